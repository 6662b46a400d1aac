"""Mooncake's master in the life of a launch: with a stand-in everywhere, and the real one where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.agent.agent import Agent
from deploy.agent.second_tier import recorded_pool
from deploy.agent.setup import AgentSetup
from deploy.agent.specs import orders
from deploy.agent.waits import Patience
from deploy.host import processes
from deploy.host.rundir import RunDir
from deploy.options import mooncake
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.engine.argv import stage_command
from epd_serve.stage_plan import StageCommand, StagePlan
from store.mooncake.master import MasterSettings
from tests.deploy.fake_launch import FAKE_MASTER, FAKE_STAGE
from tests.deploy.launched import DEADLINE_S, FakeLaunch
from tests.deploy.rooted_here import root_here
from tests.waiting import until, wait_for

POOLED = "+mm_store=mooncake"


def master_pid(one: FakeLaunch) -> int:
    return one.stage_pid("mooncake_master")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def serves(url: str) -> bool:
    """A real master answers a moment before it serves."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(json.load(answer)["service_ready"])
    except OSError:
        return False


def test_a_launch_with_a_second_tier_runs_its_master_and_ends_it(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", POOLED, "master=")
    one.wait_ready()
    launch_id = one.run_path.name
    master, metrics = recorded_pool(one.run_path)
    assert answers(f"{metrics}/health")
    assert master.startswith("127.0.0.1:")
    one.end(signal.SIGINT)
    one.assert_nothing_remains(launch_id)


def test_a_master_that_listens_elsewhere_ends_the_launch(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", POOLED, "master=--bind=0.0.0.0")
    _, err = one.process.communicate(timeout=DEADLINE_S)
    assert one.process.returncode == 1
    assert "mooncake_master listens on 0.0.0.0:" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_master_that_cannot_start_is_one_line(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", POOLED, "master=--no-such-flag")
    _, err = one.process.communicate(timeout=DEADLINE_S)
    assert one.process.returncode == 1
    assert ": the mooncake_master did not start: " in err
    assert "last-failure-mooncake_master.log" in err


def test_a_given_master_that_is_away_is_a_warning_and_none_is_started(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", "master=", "+mooncake_master=127.0.0.1:1")
    one.wait_ready()
    assert recorded_pool(one.run_path) == ("127.0.0.1:1", "")
    assert "mooncake_master" not in (one.run_path / "groups.jsonl").read_text()
    _, err = one.end()
    assert "no mooncake_master answers at 127.0.0.1:1" in err


async def test_the_master_of_a_layout_without_features_begins_with_the_first_instance_that_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "what_is_missing", lambda device, master: "")
    options = {"device": "cpu", "mm_store": "mooncake", "arena_mib": 8}
    before, after = (draw(DeployConfig(layout=layout, **options)) for layout in ("EP-D", "E-P-D"))
    run = RunDir.create(tmp_path / "run")
    lines: list[str] = []
    patience = Patience(poll_s=0.03, stop_grace_s=1.0)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(root_here())
        stack.callback(run.remove)
        setup = AgentSetup.of(run, before, fake, stand_in, patience)
        agent = Agent(setup, root.children, root.state(), say=lines.append)
        async with agent.running():
            first, (encoder, *_) = orders(before), orders(after)

            async def run_all(*names: str) -> bool:
                return (await agent.groups()).keys() == set(names)

            await asyncio.gather(*map(agent.start, first))
            await until(lambda: run_all(*(one.id for one in first)))
            assert recorded_pool(run.path) == ("", "")
            master = setup.tier.master
            assert master is not None
            for port in (master.rpc_port, master.metrics_port):
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind((master.host, port))
            await agent.start(encoder)
            await until(lambda: run_all("mooncake_master", encoder.id, *(one.id for one in first)))
            assert recorded_pool(run.path)[0] == setup.tier.address
            assert answers(f"{recorded_pool(run.path)[1]}/health")
            await agent.close()
            assert not await agent.groups()


def fake(plan: StagePlan) -> StageCommand:
    return StageCommand((sys.executable, FAKE_STAGE, plan.uds or str(plan.port)), stage_command(plan).env)


def stand_in(settings: MasterSettings) -> tuple[str, ...]:
    return (sys.executable, FAKE_MASTER, settings.host, str(settings.rpc_port), str(settings.metrics_port))


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_killed_master_is_back_on_its_ports_and_gone_after_the_launch(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", POOLED)
    one.wait_ready()
    launch_id, (_, metrics) = one.run_path.name, recorded_pool(one.run_path)
    first = master_pid(one)
    assert b"mooncake_master" in Path(f"/proc/{first}/cmdline").read_bytes()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: master_pid(one) != first and serves(f"{metrics}/health"), "the master is back")
    second = master_pid(one)
    wait_for(lambda: one.instances()["E0"]["up"], "the stages never noticed")
    _, err = one.end(signal.SIGINT)
    assert "mooncake_master is down: killed by SIGKILL (out of memory?); features stay on their host; restart in" in err
    assert "mooncake_master is back; features of the second tier were lost" in err
    assert processes.stat(second) is None
    one.assert_nothing_remains(launch_id)


@pytest.mark.slow
@pytest.mark.mooncake
def test_the_master_dies_with_a_killed_launcher(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", POOLED)
    one.wait_ready()
    pid = master_pid(one)
    assert processes.stat(pid) is not None
    one.process.kill()
    wait_for(lambda: (now := processes.stat(pid)) is None or now.dead, "the kernel has ended the master")
