"""`serve --engine sim --workers 3` as processes: counts that agree, a worker that dies, and every way to the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.host import processes
from deploy.host.environment import LAUNCH_ENV
from epd_serve.endpoint import unix_url
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.launched import fetch
from tests.deploy.sim_load import CHAT, TEXT, in_flight, load, more
from tests.stage_http import make_faulty
from tests.waiting import PATIENCE_S, wait_for

LAYOUT = "2E-2P-2D"
ENDLESS = {**TEXT, "stream": True, "max_tokens": 30_000}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The endpoint and the launcher of a layout behind three workers."""
    with launched(tmp_path, LAYOUT, "--workers", "3", "--lame-duck-s", "0", "--drain-s", "60") as (client, launcher):
        yield str(client.base_url), launcher


@contextmanager
def streams(url: str, count: int, body: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """So many streams that have begun, each on a connection of its own."""
    with ExitStack() as stack:
        begun = []
        for _ in range(count):
            client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False))
            answer = stack.enter_context(client.stream("POST", CHAT, json=body))
            assert answer.status_code == 200
            begun.append(answer)
        yield begun


def decoder_urls(launch: str) -> list[str]:
    lines = [command_line(pid).decode().split("\0") for pid in members(launch)]
    return [unix_url(line[line.index("--uds") + 1]) for line in lines if any('"role": "D"' in word for word in line)]


def slow(stages: list[str], factor: float) -> None:
    """From their next step on: what is under way takes as long as the test wants."""
    for url in stages:
        make_faulty(url, slow=factor)


def launch_id(folder: Path) -> str:
    (run,) = folder.glob("*/launcher.json")
    return run.parent.name


def members(launch: str) -> list[int]:
    return [one.pid for one in processes.running() if processes.has_environment(one.pid, LAUNCH_ENV, launch)]


def worker_pids(launch: str) -> list[int]:
    return [pid for pid in members(launch) if b"deploy.front.process" in command_line(pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def ended_requests(url: str) -> float:
    samples = re.findall(r"^epd_proxy_requests_total\{.*\} (\S+)$", fetch(f"{url}/metrics")[1], re.MULTILINE)
    return sum(map(float, samples))


@pytest.mark.slow
def test_every_worker_counts_every_request_once(workers: tuple[str, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    url, _ = workers
    assert len(worker_pids(launch_id(tmp_path))) == 3
    with streams(url, 9, ENDLESS):
        for _ in range(9):  # whichever worker answers
            found = in_flight(url)
            assert found["D0"] + found["D1"] == 9, found
            assert abs(found["D0"] - found["D1"]) <= 1, found
    wait_for(lambda: not in_flight(url), "clients that left to be forgotten")
    with load(url, leavers=4) as found:
        more(found, 40)
    assert found.errors == [] and found.broken == [] and found.left
    wait_for(lambda: not in_flight(url), "nothing in flight")
    wait_for(lambda: ended_requests(url) == 9 + found.served + found.left, "a count of all requests")


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_its_connections_with_it_and_nothing_else(
    workers: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, _ = workers
    launch = launch_id(tmp_path)
    with load(url, 6, leavers=2) as found:
        more(found)
        served = ended_requests(url)
        victim, *others = worker_pids(launch)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(now := worker_pids(launch)) == 3 and victim not in now, "another worker")
        more(found, 40)
        assert set(others) <= set(worker_pids(launch))
    assert found.errors == [], "only those whose connection broke have no answer"
    assert len(found.broken) <= 8, found.broken
    assert ended_requests(url) >= served, "what it had counted is kept"
    wait_for(lambda: not in_flight(url), "what it held to be released")


@pytest.mark.slow
def test_sigterm_lets_streams_end_and_refuses_new_ones(
    workers: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, launcher = workers
    launch = launch_id(tmp_path)
    decoders = decoder_urls(launch)
    assert len(decoders) == 2
    slow(decoders, 1000)
    with streams(url, 6, {**TEXT, "stream": True, "max_tokens": 300}) as begun:
        launcher.send_signal(signal.SIGTERM)
        wait_for(lambda: fetch(f"{url}/health")[0] == 503, "draining")
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as late:
            answer = late.post(CHAT, json=TEXT)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
        assert answer.headers["connection"] == "close" and int(answer.headers["retry-after"]) >= 1
        slow(decoders, 1)
        for one in begun:
            assert list(one.iter_lines())[-2] == "data: [DONE]"
    assert launcher.wait(PATIENCE_S) == 0
    nothing_remains(tmp_path, launch)


@pytest.mark.slow
def test_a_drain_that_is_over_cuts_what_is_left(tmp_path: Path) -> None:
    with launched(tmp_path, LAYOUT, "--workers", "3", "--drain-s", "1") as (client, launcher):
        launch = launch_id(tmp_path)
        with streams(str(client.base_url), 3, ENDLESS) as begun:
            launcher.send_signal(signal.SIGTERM)
            for one in begun:
                with pytest.raises(httpx.TransportError):
                    assert "data: [DONE]" not in list(one.iter_lines())
        assert launcher.wait(PATIENCE_S) == 0
    assert "3 requests are cut off" in (tmp_path / "launch.log").read_text()
    nothing_remains(tmp_path, launch)


@pytest.mark.slow
def test_ctrl_c_under_load_does_not_wait_for_streams(
    workers: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, launcher = workers
    launch = launch_id(tmp_path)
    with streams(url, 6, ENDLESS):
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE_S) == 0
    nothing_remains(tmp_path, launch)


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(
    workers: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, launcher = workers
    launch = launch_id(tmp_path)
    with streams(url, 3, ENDLESS):
        launcher.kill()
        launcher.wait(PATIENCE_S)
        wait_for(lambda: not members(launch), "no process")
    assert fetch(f"{url}/health")[0] == 0
    with launched(tmp_path, "PD"):
        assert f"cleaned up after launch {launch}" in (tmp_path / "launch.log").read_text()
        assert not (tmp_path / launch).exists() and not list(Path("/dev/shm").glob(f"epd-{launch}-*"))


def nothing_remains(folder: Path, launch: str) -> None:
    wait_for(lambda: not members(launch), "no process")
    assert not (folder / launch).exists() and not list(Path("/dev/shm").glob(f"epd-{launch}-*"))
