"""Control and front doors are killed in everything that a deployment does: what was begun is finished."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.host.launches import ADMIN_SOCKET
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.launched import FakeLaunch
from tests.deploy.sim_load import load, more
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.slow


class Operator:
    """Who asks over the socket in the run directory, and kills."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def status(self) -> dict[str, Any]:
        """Of the controller that is there, or of the next one."""
        while True:
            try:
                told: dict[str, Any] = self.http.get("/deployment").raise_for_status().json()
                return told
            except (httpx.ReadError, httpx.RemoteProtocolError):
                time.sleep(0.02)

    def pid(self, part: str) -> int:
        return int(wait_for(lambda: self.status()["parts"].get(part, {}).get("pid"), part))

    def kill(self, *parts: str) -> None:
        for pid in [self.pid(part) for part in parts]:
            os.kill(pid, signal.SIGKILL)

    def begin(self, path: str, body: dict[str, Any]) -> int:
        """The number of the change."""
        answer = self.http.post(f"/deployment/{path}", json=body)
        assert answer.status_code == 202, answer.text
        change = answer.json().get("change")
        return int(change["number"]) if change is not None else 0

    def ended(self, number: int) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            status = self.status()
            known = [*status["past"], *([status["change"]] if status["change"] else [])]
            return next((one for one in known if one["number"] == number and one["over"]), None)

        change = wait_for(found, f"the end of change {number}")
        assert isinstance(change, dict)
        return change

    def stages(self) -> dict[str, int]:
        return {one["id"]: one["pid"] for one in self.status()["instances"]}

    def whole(self) -> None:
        def is_whole() -> bool:
            status = self.status()
            return status["state"] == "steady" and all(one["phase"] == "up" for one in status["instances"])

        wait_for(is_whole, "steady")


@contextmanager
def commanded(run_root: Path) -> Iterator[Operator]:
    (path,) = run_root.glob(f"*/{ADMIN_SOCKET}")
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://deployment", timeout=PATIENCE_S
    ) as http:
        yield Operator(http)


CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "an instance comes": ("E-P-D", "scale", {"counts": {"E": 2}}),
    "an instance goes": ("2E-P-D", "scale", {"counts": {"E": 1}}),
    "another layout": ("EP-D", "layout", {"layout": "E-P-D"}),
    "a pause": ("EP-D", "instances/D0/restart", {"pause_s": 30}),
    "a flip": ("2P-2D", "scale", {"counts": {"P": 1, "D": 3}}),
    "new front doors": ("E-P-D", "front/restart", {}),
}


@pytest.mark.parametrize("kills", [1, 2, 4])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_finished_by_who_follows(tmp_path: Path, what: str, kills: int) -> None:
    layout, path, body = CHANGES[what]
    flags = ["--switchable"] if what == "a flip" else []
    with launched(tmp_path, layout, *flags) as (client, _), commanded(tmp_path) as operator:
        with load(str(client.base_url)) as found:
            more(found)
            before, fronts = operator.stages(), operator.pid("front.0")
            number = operator.begin(path, body)
            for _ in range(kills):
                operator.kill("control")
            if number:
                change = operator.ended(number)
                assert change["state"] == "done" and change["cut_requests"] == 0, change
            else:
                wait_for(lambda: not operator.status()["front"]["restarting"], "new front doors")
                assert fronts not in [one["pid"] for one in operator.status()["parts"].values()]
            operator.whole()
            more(found)
        after = operator.stages()
    assert (found.errors, found.broken) == ([], [])
    kept = before.keys() & after.keys()
    assert all(after[name] == before[name] for name in kept), "whoever stays was not started again"


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment_of_many_changes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with launched(tmp_path, "E-P-D", "--workers", "2") as (client, _), commanded(tmp_path) as operator:
        with load(str(client.base_url)) as found:
            for encoders in (2, 1, 2, 1):
                number = operator.begin("scale", {"counts": {"E": encoders}})
                for _ in range(2):
                    time.sleep(draw.uniform(0.0, 1.0))
                    operator.kill("control")
                assert operator.ended(number)["state"] == "done"
                operator.whole()
            more(found)
    assert (found.errors, found.broken) == ([], [])


def test_front_doors_and_controller_killed_together_leave_the_stages(tmp_path: Path) -> None:
    with launched(tmp_path, "E-P-D", "--workers", "2") as (client, _), commanded(tmp_path) as operator:
        before = operator.stages()
        operator.kill("control", "front.0", "front.1")
        operator.whole()
        assert operator.stages() == before
        with load(str(client.base_url)) as found:
            more(found)
        assert (found.errors, found.broken) == ([], [])
        held = [one["in_flight"] for one in operator.status()["instances"]]
    assert held == [0, 0, 0]


def test_options_given_to_front_doors_outlive_them_and_the_controller(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "x" * 600, "max_tokens": 1}
    with launched(tmp_path, "E-P-D") as (client, _), commanded(tmp_path) as operator:

        def status() -> int:
            try:
                return client.post("/v1/completions", json=body).status_code
            except httpx.TransportError:
                return 0

        assert status() != 413
        refused = operator.http.post("/deployment/front/restart", json={"proxy": ["max_body_bites=500"]})
        assert refused.status_code == 400 and "max_body_bytes" in refused.text
        front = operator.pid("front.0")
        operator.begin("front/restart", {"proxy": ["max_body_bytes=500"]})
        wait_for(lambda: not operator.status()["front"]["restarting"], "new front doors")
        assert status() == 413
        operator.kill("control")
        fronts = [name for name in operator.status()["parts"] if name.startswith("front")]
        operator.kill(*fronts)
        wait_for(lambda: status() == 413, "the next front door")
        assert front not in [one["pid"] for one in operator.status()["parts"].values()]


def test_an_end_that_is_under_way_goes_on(tmp_path: Path) -> None:
    """SIGTERM is told again: nobody is cut off, and the launch ends well."""
    with launched(tmp_path, "E-P-D", "--lame-duck-s", "2", "--drain-s", "20") as (client, launcher):
        with commanded(tmp_path) as operator:
            controller = operator.pid("control")
        answers: list[int] = []
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE_S, trust_env=False) as http:
            launcher.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get("/ready").status_code == 503, "it is leaving")
            os.kill(controller, signal.SIGKILL)
            body = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            answers.append(http.post("/v1/chat/completions", json=body).status_code)
        assert launcher.wait(60) == 0 and answers == [200]
        assert not list(tmp_path.glob("*/launcher.json"))


def test_a_start_that_is_under_way_goes_on(launch: Any) -> None:
    one: FakeLaunch = launch("E-PD", "--delay=3")
    wait_for(lambda: list(one.root.glob(f"*/{ADMIN_SOCKET}")), "its socket")
    with commanded(one.root) as operator:
        wait_for(lambda: len(operator.stages()) == 2, "both start")
        operator.kill("control")
        one.wait_ready()
        operator.whole()
    out, err = one.end()
    assert out.count("Ready in") == 1 and one.process.returncode == 0, err


def test_what_fails_at_the_start_ends_the_launch_also_after_another_controller(launch: Any) -> None:
    one: FakeLaunch = launch("E-PD", "--delay=60")
    wait_for(lambda: list(one.root.glob(f"*/{ADMIN_SOCKET}")), "its socket")
    with commanded(one.root) as operator:
        wait_for(lambda: all(operator.stages().values()) and len(operator.stages()) == 2, "both start")
        before = operator.pid("control")
        operator.kill("control")
        wait_for(lambda: operator.pid("control") != before, "another one")
        os.killpg(operator.stages()["PD0"], signal.SIGKILL)
    _, err = one.process.communicate(timeout=PATIENCE_S)
    assert one.process.returncode == 1 and "PD0 did not start" in err and "last-failure-PD0.log" in err
