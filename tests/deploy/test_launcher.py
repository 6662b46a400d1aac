"""Whole launches in a process of their own, with fake stages: what remains when they end, however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import processes
from deploy.environment import LAUNCH_ENV
from deploy.ports import free_ports
from deploy.reaper import reap_dead

REPOSITORY = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("fake_launch.py"))
DEADLINE_S = 20.0


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.03)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class FakeLaunch:
    """One launch under test."""

    def __init__(self, root: Path, port: int, layout: str, *flags: str) -> None:
        self.root, self.port = root, port
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, str(root), str(port), layout, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None

    def instances(self) -> dict[str, Any]:
        _, body = self.get("/instances")
        return {row["id"]: row for row in body["instances"]} if body else {}

    def wait_ready(self) -> None:
        wait_until(lambda: self.get("/health")[0] == 200 or self.process.poll() is not None, "healthy")
        assert self.process.poll() is None, self.process.communicate()[1]

    @property
    def run_path(self) -> Path:
        (path,) = (path for path in self.root.iterdir() if (path / "launcher.json").exists())
        return path

    def stage_pid(self, instance: str) -> int:
        lines = (self.run_path / "groups.jsonl").read_text().splitlines()
        return next(entry["pid"] for entry in map(json.loads, reversed(lines)) if entry["instance"] == instance)

    def members(self, launch_id: str) -> list[int]:
        return [p.pid for p in processes.running() if processes.has_environment(p.pid, LAUNCH_ENV, launch_id)]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[str, str]:
        self.process.send_signal(number)
        return self.process.communicate(timeout=DEADLINE_S)

    def assert_nothing_remains(self, launch_id: str) -> None:
        wait_until(lambda: not self.members(launch_id), "no process", 5)
        assert not list(Path("/dev/shm").glob(f"epd-{launch_id}-*"))
        assert not (self.root / launch_id).exists()
        assert self.get("/health")[0] == 0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., FakeLaunch]]:
    made: list[FakeLaunch] = []

    def start(layout: str, *flags: str, port: int | None = None) -> FakeLaunch:
        made.append(FakeLaunch(tmp_path / "run", port or free_ports(1)[0], layout, *flags))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()
    reap_dead(tmp_path / "run")


def test_a_launch_serves_and_ctrl_c_leaves_nothing(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", "--child")
    one.wait_ready()
    launch_id = one.run_path.name
    assert (Path("/dev/shm") / f"epd-{launch_id}-arena").exists()
    assert set(one.instances()) == {"E0", "P0", "D0"}
    assert len(one.members(launch_id)) == 6
    before = time.monotonic()
    out, err = one.end(signal.SIGINT)
    assert time.monotonic() - before < 15
    assert one.process.returncode == 0
    assert "Ready in" in out
    assert "curl -s http://127.0.0.1" in out
    assert "[E0] ready in" in err
    one.assert_nothing_remains(launch_id)


def test_a_stage_that_ignores_sigterm_is_killed(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("E-PD", "--ignore-term", "--child")
    one.wait_ready()
    launch_id = one.run_path.name
    one.end(signal.SIGTERM)
    one.assert_nothing_remains(launch_id)


def test_a_second_ctrl_c_does_not_wait(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("TP1", "--ignore-term")
    one.wait_ready()
    launch_id = one.run_path.name
    one.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    one.end(signal.SIGINT)
    one.assert_nothing_remains(launch_id)


def test_ctrl_c_while_stages_start_leaves_nothing(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("E-PD", "--delay=60", "--child")
    wait_until(lambda: one.get("/health")[0] == 503, "the proxy answers while stages start")
    launch_id = one.run_path.name
    wait_until(lambda: len(one.members(launch_id)) == 4, "stages and their children run")
    out, err = one.end(signal.SIGINT)
    assert one.process.returncode == 0
    assert "Ready" not in out
    assert "Traceback" not in err
    one.assert_nothing_remains(launch_id)


def test_a_killed_stage_comes_back_with_a_new_incarnation_on_the_same_port(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D")
    one.wait_ready()
    before = one.instances()["P0"]["incarnation"]
    pid = one.stage_pid("P0")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: one.get("/health")[0] == 503, "the proxy knows")
    one.wait_ready()
    after = one.instances()["P0"]
    assert after["up"]
    assert after["incarnation"] != before
    assert one.stage_pid("P0") != pid
    assert one.instances()["D0"]["up"]


def test_a_stage_that_fails_its_first_start_ends_the_launch_with_its_reason(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("E-P-D", "P0=--fail=no such dtype", "--child")
    _, err = one.process.communicate(timeout=DEADLINE_S)
    assert one.process.returncode == 1
    assert "epd-serve: stage P0 did not start: ValueError: no such dtype; its log: " in err
    assert "Traceback" not in err
    left = [path.name for path in one.root.iterdir()]
    assert left == ["last-failure-P0.log"]


def test_after_kill_9_of_the_launcher_the_next_start_cleans_up(launch: Callable[..., FakeLaunch]) -> None:
    first = launch("(E-P)-D", "--child")
    first.wait_ready()
    launch_id = first.run_path.name
    assert len(first.members(launch_id)) == 6
    first.process.kill()
    first.process.wait()
    assert len(first.members(launch_id)) == 6, "fake stages outlive their launcher"
    second = launch("TP1", port=first.port)
    second.wait_ready()
    assert not first.members(launch_id)
    assert not list(Path("/dev/shm").glob(f"epd-{launch_id}-*"))
    assert second.run_path.name != launch_id
    _, err = second.end()
    assert f"cleaned up after launch {launch_id}" in err


def test_a_living_launch_is_left_alone(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("TP1")
    one.wait_ready()
    assert reap_dead(one.root) == []
    assert one.get("/health")[0] == 200


def test_a_port_in_use_is_one_line(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("TP1")
    one.wait_ready()
    two = launch("TP1", port=one.port)
    _, err = two.process.communicate(timeout=DEADLINE_S)
    assert two.process.returncode == 1
    assert f"{one.port} is in use" in err
    assert len(err.splitlines()) == 1
