"""A head and joined stages as processes, on addresses of their own, with stand-ins for vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from epd_serve.key_files import stage_key
from tests.deploy.hosts import KEY, Hosts, fetch
from tests.waiting import PATIENCE_S, wait_for


def server_pid(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as answer:
        return int(answer.headers["X-Pid"])


def three(hosts: Hosts) -> dict[str, str]:
    urls = {role: hosts.stage(role, role, f"127.0.0.{n}") for n, role in enumerate("EPD", start=2)}
    wait_for(lambda: hosts.up() == ["D0", "E0", "P0"], "three stages")
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
    wait_for(lambda: hosts.instances()["P0"]["incarnation"] != before, "another life")
    wait_for(lambda: hosts.up() == ["D0", "E0", "P0"], "P0 to be back")
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
        peers = re.search(r"'peers': '([^']+)'", wiring).group(1)  # type: ignore[union-attr]
        assert json.loads(Path(peers).read_text())[0]["events"] == bus_out
    port = int(urls["D"].rpartition(":")[2])
    assert f"'kv_worker_endpoint': 'tcp://127.0.0.4:{port + 1}+{{rank}}'" in d
    arenas = {re.search(r"'arena_id': '(\w+)'", wiring).group(1) for wiring in (e, p, d)}  # type: ignore[union-attr]
    assert len(arenas) == 3, "every machine has an arena of its own"


@pytest.mark.slow
def test_stages_may_come_before_their_head_and_say_so_once(hosts: Hosts) -> None:
    hosts.stage("P", "P", "127.0.0.3")
    wait_for(lambda: "no answer from" in hosts.log("P"), "a line about the head")
    hosts.head()
    wait_for(lambda: hosts.up() == ["P0"], "P0")
    assert hosts.log("P").count("no answer from") == 1


@pytest.mark.slow
def test_a_restarted_head_finds_its_stages_again_and_they_served_meanwhile(hosts: Hosts) -> None:
    hosts.head()
    urls = three(hosts)
    lives = {name: entry["incarnation"] for name, entry in hosts.instances().items()}
    pids = {role: server_pid(url) for role, url in urls.items()}
    hosts.send("head", signal.SIGKILL)
    hosts.processes.pop("head").wait()
    wait_for(lambda: all("serving on" in hosts.log(role) for role in "EPD"), "stages to notice")
    assert {role: server_pid(url) for role, url in urls.items()} == pids
    hosts.head()
    wait_for(lambda: hosts.up() == ["D0", "E0", "P0"], "stages to join again")
    assert {name: entry["incarnation"] for name, entry in hosts.instances().items()} == lives
    assert {role: server_pid(url) for role, url in urls.items()} == pids, "nothing was restarted"
    assert all(hosts.log(role).count("serving on") <= 3 for role in "EPD")


@pytest.mark.slow
def test_a_head_with_other_settings_has_its_stages_restarted_with_them(hosts: Hosts) -> None:
    hosts.head()
    hosts.stage("D", "D", "127.0.0.4")
    wait_for(lambda: hosts.up() == ["D0"], "D0")
    assert hosts.end("head") == 0
    hosts.head("--kv-grouping", "fixed:2")
    wait_for(lambda: len(hosts.wirings("D")) == 2 and hosts.up() == ["D0"], "D0 with other settings")
    assert "'kv_grouping': 'fixed:2'" in hosts.wirings("D")[-1]


@pytest.mark.slow
def test_a_killed_agent_is_noticed_and_its_successor_has_its_name(hosts: Hosts) -> None:
    hosts.head()
    url = hosts.stage("P", "P", "127.0.0.3")
    wait_for(lambda: hosts.up() == ["P0"], "P0")
    hosts.send("P", signal.SIGSTOP)
    wait_for(lambda: hosts.instances()["P0"]["reason"] == "no beat for 5 s", "its silence to be noticed")
    hosts.send("P", signal.SIGCONT)
    wait_for(lambda: hosts.up() == ["P0"], "its next beat to bring it back")
    hosts.send("P", signal.SIGKILL)
    hosts.processes.pop("P").wait()
    pid = server_pid(url)
    os.kill(pid, signal.SIGKILL)  # a real stage dies with its agent
    hosts.stage_ports = iter([int(url.rpartition(":")[2])])
    wait_for(lambda: fetch(url)[0] == 0, "the address to be free")
    hosts.stage("P", "P", "127.0.0.3")
    wait_for(lambda: "cleaned up after launch" in hosts.log("P"), "its successor to clean up")
    wait_for(lambda: len(hosts.wirings("P")) == 2 and hosts.up() == ["P0"], "P0 to be back")
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
    wait_for(lambda: fetch(f"{hosts.url}/health")[0] == 503, "the head")
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
    wait_for(lambda: hosts.up() == ["left"], "the first")
    hosts.stage("two", "P", "127.0.0.4", "--instance=left")
    assert hosts.processes["two"].wait(PATIENCE_S) == 1
    assert "the name left belongs to" in hosts.log("two")
    assert hosts.up() == ["left"]
