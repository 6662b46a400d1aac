"""A whole cluster as a user starts it: a head with two workers, and simulated stages that come and go under load."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest

from deploy.host.processes import stat
from epd_serve.key_files import admin_key
from tests.deploy.hosts import KEY, Hosts, fetch
from tests.deploy.sim_load import TEXT, in_flight, load, more, picture
from tests.waiting import PATIENCE_S, wait_for

ADMIN = {"authorization": f"Bearer {admin_key(KEY)}"}

ADDRESSES = {"E": "127.0.0.2", "P": "127.0.0.3", "D": "127.0.0.4"}


def profile_flags(hosts: Hosts) -> tuple[str, str]:
    """Steps that take long enough for requests to be under way when something happens to a stage."""
    path = hosts.folder / "profile.json"
    path.write_text(json.dumps({"decode_step_s": [[1, 0.01]], "prefill": {"setup_s": 0.01}}))
    return "--sim-profile", str(path)


def join(hosts: Hosts, *names: str) -> dict[str, str]:
    """Start the stages called so, and wait until all of them serve; their urls."""
    flags = profile_flags(hosts)
    urls = {name: hosts.simulated(name, name[0], ADDRESSES[name[0]], "--instance", name, *flags) for name in names}
    wait_for(lambda: set(names) <= set(hosts.up()), f"{', '.join(names)} to serve")
    return urls


def ask(hosts: Hosts, body: dict[str, Any]) -> dict[str, Any]:
    """The instances that served it, by role."""
    with httpx.Client(base_url=hosts.url, timeout=PATIENCE_S, trust_env=False) as client:
        answer = client.post("/v1/chat/completions", json=body, headers={"x-epd-explain": "1"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    return dict(answer.headers)


def server_of(hosts: Hosts, name: str) -> int:
    """The process that the agent of this stage watches: the last one that it has started."""
    (groups,) = (hosts.folder / f"run-{name}").glob("*/groups.jsonl")
    return int(json.loads(groups.read_text().splitlines()[-1])["pid"])


def ended(pid: int) -> bool:
    found = stat(pid)
    return found is None or found.dead


def kill_agent(hosts: Hosts, name: str) -> None:
    """As when its machine goes, and comes back without anything."""
    server = server_of(hosts, name)
    hosts.send(name, signal.SIGKILL)
    hosts.processes.pop(name).wait(PATIENCE_S)
    wait_for(lambda: ended(server), "the server to die with its agent")


@pytest.mark.slow
def test_text_and_pictures_pass_through_stages_that_joined_a_head_with_workers(hosts: Hosts) -> None:
    hosts.head("--workers", "2")
    wait_for(lambda: fetch(f"{hosts.url}/health")[0] == 503, "the head")
    join(hosts, "E0", "P0", "D0")
    wait_for(lambda: fetch(f"{hosts.url}/ready?all")[0] == 200, "all roles")
    for _ in range(4):  # whichever worker takes it
        assert ask(hosts, TEXT)["x-epd-path"] == "P-D"
    seen = ask(hosts, picture(60))
    assert seen["x-epd-path"] == "E-P-D"
    wait_for(lambda: not in_flight(hosts.admin, ADMIN), "nothing in flight")
    assert hosts.end("head") == 0 and hosts.leftovers("head") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["E0", "P0", "D0"])
def test_stages_are_killed_and_leave_and_no_client_notices(hosts: Hosts, name: str) -> None:
    role, other = name[0], f"{name[0]}1"
    hosts.head("--workers", "2")
    urls = join(hosts, "E0", "P0", "D0", other)
    with load(hosts.url) as found:
        more(found)
        life = hosts.instances()[name]["incarnation"]
        os.kill(server_of(hosts, name), signal.SIGKILL)
        wait_for(lambda: hosts.instances()[name]["incarnation"] != life and name in hosts.up(), "its next life")
        more(found)
        kill_agent(hosts, name)
        more(found)
        port = int(urls[name].rpartition(":")[2])
        hosts.simulated(name, role, ADDRESSES[role], "--instance", name, *profile_flags(hosts), port=port)
        wait_for(lambda: "cleaned up after launch" in hosts.log(name) and name in hosts.up(), f"{name} to join again")
        more(found)
        assert hosts.end(other) == 0 and hosts.leftovers(other) == []
        assert other not in hosts.instances()
        more(found)
    assert found.errors == []
    wait_for(lambda: not in_flight(hosts.admin, ADMIN), "nothing in flight")


@pytest.mark.slow
def test_a_head_that_comes_back_serves_with_the_stages_that_lived_on(hosts: Hosts) -> None:
    hosts.head("--workers", "2")
    join(hosts, "E0", "P0", "D0")
    lives = {name: one["incarnation"] for name, one in hosts.instances().items()}
    hosts.send("head", signal.SIGKILL)
    hosts.processes.pop("head").wait(PATIENCE_S)
    wait_for(lambda: all("serving on" in hosts.log(name) for name in lives), "stages to notice")
    hosts.head("--workers", "2")
    wait_for(lambda: hosts.up() == sorted(lives), "the stages again")
    assert {name: one["incarnation"] for name, one in hosts.instances().items()} == lives
    assert ask(hosts, TEXT)["x-epd-path"] == "P-D"
    assert ask(hosts, picture(64))["x-epd-path"] == "E-P-D"


@pytest.mark.slow
def test_a_simulated_stage_with_another_key_is_refused(hosts: Hosts) -> None:
    hosts.head()
    wait_for(lambda: fetch(f"{hosts.url}/health")[0] == 503, "the head")
    hosts.key_file.write_text("another-key-of-some-length")
    hosts.simulated("E", "E", ADDRESSES["E"])
    assert hosts.processes["E"].wait(PATIENCE_S) == 1
    assert "another cluster key" in hosts.log("E") and "Traceback" not in hosts.log("E")
    assert hosts.instances() == {} and hosts.leftovers("E") == []
