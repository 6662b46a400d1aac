"""The parts of a deployment fail apart: one that is killed under load costs no request, and comes again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.launched import children
from tests.deploy.sim_load import load
from tests.waiting import wait_for

PARTS = ("epd controller", "epd agent")


def part(keeper: int, name: str) -> int:
    return int(wait_for(lambda: [pid for pid, own in children(keeper).items() if own == name], name)[0])


@pytest.mark.parametrize("killed", [PARTS[:1], PARTS[1:], PARTS], ids=["controller", "agent", "both"])
def test_a_part_that_is_killed_costs_no_request_and_no_process(tmp_path: Path, killed: tuple[str, ...]) -> None:
    with launched(tmp_path, "E-P-D") as (client, launcher):
        others = {pid for pid, name in children(launcher.pid).items() if name not in PARTS}
        with load(str(client.base_url)) as found:
            for _ in range(2):
                before = {name: part(launcher.pid, name) for name in killed}
                served = found.served
                for pid in before.values():
                    os.kill(pid, signal.SIGKILL)
                wait_for(lambda: all(part(launcher.pid, name) != pid for name, pid in before.items()), "another")  # noqa: B023
                wait_for(lambda: found.served > served + 20, "more requests")  # noqa: B023
        assert (found.errors, found.broken) == ([], [])
        assert {pid for pid, name in children(launcher.pid).items() if name not in PARTS} == others
        assert client.get("/ready").status_code == 200


def test_the_keeper_stays_small_and_has_one_thread(tmp_path: Path) -> None:
    with launched(tmp_path, "E-P-D") as (_, launcher):
        assert len(os.listdir(f"/proc/{launcher.pid}/task")) == 1
        libraries = Path(f"/proc/{launcher.pid}/maps").read_text()
        assert not [name for name in ("numpy", "uvloop", "torch", "pydantic") if name in libraries]
