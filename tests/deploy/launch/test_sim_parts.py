"""What controls a deployment may be killed: under load it costs no request and no process, and comes again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from deploy.host import processes
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.launched import children
from tests.deploy.sim_load import load
from tests.waiting import wait_for

CONTROL = "epd control"


def control(root: int) -> int:
    """Pid of its life of now."""
    return int(wait_for(lambda: [pid for pid, own in children(root).items() if own == CONTROL], CONTROL)[0])


def others(root: int) -> dict[int, int]:
    """When each of the rest has begun."""
    found = {pid: processes.stat(pid) for pid, name in children(root).items() if name != CONTROL}
    return {pid: one.start_ticks for pid, one in found.items() if one is not None}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=lambda number: number.name)
def test_control_that_is_killed_costs_no_request_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, "E-P-D") as (client, launcher):
        before = others(launcher.pid)
        assert len(before) == 4, "three stages and a front door"
        with load(str(client.base_url)) as found:
            for _ in range(3):
                killed, served = control(launcher.pid), found.served
                os.kill(killed, number)
                wait_for(lambda: control(launcher.pid) != killed, "another")  # noqa: B023
                wait_for(lambda: found.served > served + 20, "more requests")  # noqa: B023
        assert (found.errors, found.broken) == ([], [])
        assert others(launcher.pid) == before
        assert client.get("/ready").status_code == 200


def test_control_that_is_killed_as_soon_as_it_comes_costs_no_request_either(tmp_path: Path) -> None:
    """Whatever of its beginning it has come to."""
    with launched(tmp_path, "E-P-D") as (client, launcher):
        before, last = others(launcher.pid), 0
        with load(str(client.base_url)) as found:
            for _ in range(5):
                wait_for(lambda: control(launcher.pid) != last, "another")  # noqa: B023
                last = control(launcher.pid)
                os.kill(last, signal.SIGKILL)
            served = found.served
            wait_for(lambda: found.served > served + 20, "more requests")
        assert (found.errors, found.broken) == ([], [])
        assert others(launcher.pid) == before
        wait_for(lambda: control(launcher.pid) != last and client.get("/ready").status_code == 200, "ready")


def test_the_root_stays_small_and_has_one_thread(tmp_path: Path) -> None:
    with launched(tmp_path, "E-P-D") as (_, launcher):
        assert len(os.listdir(f"/proc/{launcher.pid}/task")) == 1
        libraries = Path(f"/proc/{launcher.pid}/maps").read_text()
        assert not [name for name in ("numpy", "uvloop", "torch", "pydantic") if name in libraries]
