"""A head and joined stages as processes, on addresses of their own, with stand-ins for vLLM."""

from __future__ import annotations

import json
import os
import re
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

from deploy.ports import free_ports
from epd_serve.cluster import stage_key
from tests.deploy.launched import neighbours
from tests.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
FAKE_JOIN = str(Path(__file__).with_name("fake_join.py"))
KEY = "0123456789abcdef-cluster"


class Hosts:
    """Processes of one cluster; every one is ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = neighbours(14)
        self.stage_ports = iter(free_ports(40)[::2])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.key_file = folder / "key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(KEY + "\n")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def head(self, *flags: str) -> None:
        argv = ["-m", "deploy.cli", "proxy", "--cluster-key-file", str(self.key_file), "--port", str(self.port)]
        self._start("head", *argv, "--mooncake-master", "none", "--run-root", str(self._root("head")), *flags)

    def stage(self, name: str, role: str, host: str, *flags: str, key_file: Path | None = None) -> str:
        """Start one; its url."""
        port = next(self.stage_ports)
        arguments = (str(self._root(name)), self.url, str(key_file or self.key_file), role, host, str(port), *flags)
        self._start(name, FAKE_JOIN, *arguments)
        return f"http://{host}:{port}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(name, number)
        return self.processes.pop(name).wait(PATIENCE_S)

    def instances(self) -> dict[str, dict[str, Any]]:
        found = fetch(f"{self.url}/instances")[1]
        return {entry["id"]: entry for entry in json.loads(found or "{}").get("instances", [])}

    def up(self) -> list[str]:
        return sorted(name for name, entry in self.instances().items() if entry["up"])

    def leftovers(self, name: str) -> list[Path]:
        return [path for path in self._root(name).iterdir() if path.is_dir()]

    def wirings(self, name: str) -> list[str]:
        """What the lives of its server were wired with, oldest first."""
        written = sorted(self._root(name).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_text() for path in written]

    def _root(self, name: str) -> Path:
        (self.folder / f"run-{name}").mkdir(mode=0o700, exist_ok=True)
        return self.folder / f"run-{name}"

    def _start(self, name: str, *argv: str) -> None:
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *argv], env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, cwd=self.folder
            )


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)


def server_pid(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as answer:
        return int(answer.headers["X-Pid"])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    for process in made.processes.values():
        process.terminate()
    for process in made.processes.values():
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def three(hosts: Hosts) -> dict[str, str]:
    urls = {role: hosts.stage(role, role, f"127.0.0.{n}") for n, role in enumerate("EPD", start=2)}
    until(lambda: hosts.up() == ["D0", "E0", "P0"], "three stages")
    return urls


def the_stages_key_is_in_the_servers_environment_and_in_no_command_line(hosts: Hosts, pid: int) -> None:
    assert f"VLLM_API_KEY={stage_key(KEY)}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    for process in (pid, *(one.pid for one in hosts.processes.values())):
        line = Path(f"/proc/{process}/cmdline").read_bytes()
        assert KEY.encode() not in line and stage_key(KEY).encode() not in line


def test_three_stages_join_serve_are_restarted_and_leave_and_nobody_sees_their_key(hosts: Hosts) -> None:
    hosts.head()
    urls = three(hosts)
    assert fetch(f"{hosts.url}/health")[0] == 200
    the_stages_key_is_in_the_servers_environment_and_in_no_command_line(hosts, server_pid(urls["D"]))
    before = hosts.instances()["P0"]["incarnation"]
    os.kill(server_pid(urls["P"]), signal.SIGKILL)
    until(lambda: hosts.instances()["P0"]["incarnation"] != before, "another life")
    until(lambda: hosts.up() == ["D0", "E0", "P0"], "P0 to be back")
    for role in "EPD":
        assert hosts.end(role, signal.SIGINT if role == "E" else signal.SIGTERM) == 0
        assert hosts.leftovers(role) == []
    assert hosts.instances() == {}
    assert fetch(f"{hosts.url}/health")[0] == 503
    assert hosts.end("head") == 0
    assert hosts.leftovers("head") == []


@pytest.mark.slow
def test_stages_listen_where_they_say_and_are_wired_to_the_bus(hosts: Hosts) -> None:
    hosts.head()
    urls = three(hosts)
    bus_in, bus_out = (f"tcp://127.0.0.1:{hosts.port + n}" for n in (10, 11))
    e, p, d = (hosts.wirings(role)[-1] for role in "EPD")
    for wiring, address in ((e, "127.0.0.2"), (p, "127.0.0.3"), (d, "127.0.0.4")):
        assert f"'host': '{address}'" in wiring
        assert f"'publish': '{bus_in}', 'publish_by_connecting': True" in wiring
        assert "'kv_transport': 'mooncake'" in wiring
    assert "'events': {}" in e
    assert f"'events': {{'bus': '{bus_out}'}}" in p
    assert f"'events': {{'bus': '{bus_out}'}}" in d
    port = int(urls["D"].rpartition(":")[2])
    assert f"'kv_worker_endpoint': 'tcp://127.0.0.4:{port + 1}+{{rank}}'" in d
    arenas = {re.search(r"'arena_id': '(\w+)'", wiring).group(1) for wiring in (e, p, d)}  # type: ignore[union-attr]
    assert len(arenas) == 3, "every machine has an arena of its own"


@pytest.mark.slow
def test_stages_may_come_before_their_head_and_say_so_once(hosts: Hosts) -> None:
    hosts.stage("P", "P", "127.0.0.3")
    until(lambda: "no answer from" in hosts.log("P"), "a line about the head")
    hosts.head()
    until(lambda: hosts.up() == ["P0"], "P0")
    assert hosts.log("P").count("no answer from") == 1


@pytest.mark.slow
def test_a_restarted_head_finds_its_stages_again_and_they_served_meanwhile(hosts: Hosts) -> None:
    hosts.head()
    urls = three(hosts)
    lives = {name: entry["incarnation"] for name, entry in hosts.instances().items()}
    pids = {role: server_pid(url) for role, url in urls.items()}
    hosts.send("head", signal.SIGKILL)
    hosts.processes.pop("head").wait()
    until(lambda: all("serving on" in hosts.log(role) for role in "EPD"), "stages to notice")
    assert {role: server_pid(url) for role, url in urls.items()} == pids
    hosts.head()
    until(lambda: hosts.up() == ["D0", "E0", "P0"], "stages to join again")
    assert {name: entry["incarnation"] for name, entry in hosts.instances().items()} == lives
    assert {role: server_pid(url) for role, url in urls.items()} == pids, "nothing was restarted"
    assert all(hosts.log(role).count("serving on") <= 3 for role in "EPD")


@pytest.mark.slow
def test_a_head_with_other_settings_has_its_stages_restarted_with_them(hosts: Hosts) -> None:
    hosts.head()
    hosts.stage("D", "D", "127.0.0.4")
    until(lambda: hosts.up() == ["D0"], "D0")
    assert hosts.end("head") == 0
    hosts.head("--kv-grouping", "fixed:2")
    until(lambda: len(hosts.wirings("D")) == 2 and hosts.up() == ["D0"], "D0 with other settings")
    assert "'kv_grouping': 'fixed:2'" in hosts.wirings("D")[-1]


@pytest.mark.slow
def test_a_killed_agent_is_noticed_and_its_successor_has_its_name(hosts: Hosts) -> None:
    hosts.head()
    url = hosts.stage("P", "P", "127.0.0.3")
    until(lambda: hosts.up() == ["P0"], "P0")
    hosts.send("P", signal.SIGSTOP)
    until(lambda: hosts.instances()["P0"]["reason"] == "no beat for 5 s", "its silence to be noticed")
    hosts.send("P", signal.SIGCONT)
    until(lambda: hosts.up() == ["P0"], "its next beat to bring it back")
    hosts.send("P", signal.SIGKILL)
    hosts.processes.pop("P").wait()
    pid = server_pid(url)
    os.kill(pid, signal.SIGKILL)  # a real stage dies with its agent
    hosts.stage_ports = iter([int(url.rpartition(":")[2])])
    until(lambda: fetch(url)[0] == 0, "the address to be free")
    hosts.stage("P", "P", "127.0.0.3")
    until(lambda: "cleaned up after launch" in hosts.log("P"), "its successor to clean up")
    until(lambda: len(hosts.wirings("P")) == 2 and hosts.up() == ["P0"], "P0 to be back")
    assert len(hosts.instances()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(
            ("--passed=--mm-processor-kwargs", '--passed={"max_pixels": 5}'),
            "the head has none, this stage --mm-processor-kwargs",
            marks=pytest.mark.slow,
        ),
        (("--fail=no memory",), "E0 did not start: ValueError: no memory"),
    ],
    ids=["other processing flags", "a server that does not start"],
)
def test_a_stage_that_cannot_serve_ends_with_the_reason_and_leaves_nothing(
    hosts: Hosts, flags: tuple[str, ...], said: str
) -> None:
    hosts.head()
    hosts.stage("E", "E", "127.0.0.2", *flags)
    assert hosts.processes["E"].wait(PATIENCE_S) == 1
    assert said in hosts.log("E")
    assert "Traceback" not in hosts.log("E")
    assert hosts.leftovers("E") == []
    assert hosts.instances() == {}


@pytest.mark.slow
def test_a_stage_with_another_key_ends_and_the_head_knows_nothing_of_it(hosts: Hosts) -> None:
    hosts.head()
    until(lambda: fetch(f"{hosts.url}/health")[0] == 503, "the head")
    other = hosts.folder / "other"
    other.touch(mode=0o600)
    other.write_text("another-key-of-some-length")
    hosts.stage("E", "E", "127.0.0.2", key_file=other)
    assert hosts.processes["E"].wait(PATIENCE_S) == 1
    assert "another cluster key" in hosts.log("E")
    assert hosts.instances() == {}


@pytest.mark.slow
def test_a_name_that_is_taken_is_said_before_anything_slow_starts(hosts: Hosts) -> None:
    hosts.head()
    hosts.stage("one", "P", "127.0.0.3", "--instance=left")
    until(lambda: hosts.up() == ["left"], "the first")
    hosts.stage("two", "P", "127.0.0.4", "--instance=left")
    assert hosts.processes["two"].wait(PATIENCE_S) == 1
    assert "the name left belongs to" in hosts.log("two")
    assert hosts.up() == ["left"]
