"""Node processes: two of them on this machine, one with front doors, run by somebody else; every end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.host.environment import module_environment
from deploy.host.launches import reap_dead
from deploy.node.process import LOG
from deploy.node.start import end_node, find_node, start_node
from epd_serve.errors import ConfigError
from tests.deploy.launched import children
from tests.deploy.node.nodes import Deployment, deployment
from tests.waiting import until


def part(d: Deployment, node: str, name: str) -> int:
    """Pid of the life of now; 0 between two."""
    return next((pid for pid, own in children(d.runs[node].pid).items() if own == f"epd {name}"), 0)


def door(d: Deployment) -> int:
    (pid,) = d.doors.pids.values()
    return pid


async def two(d: Deployment) -> list:
    await asyncio.gather(d.start("a", front=True), d.start("b"))
    d.join("a", front=True)
    d.join("b")
    return d.orders("a", "b")


async def test_a_node_process_is_nobodys_child_and_found_by_its_name(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        run = await d.start("a")
        assert run.ready and find_node("test", "a", tmp_path) == run
        assert find_node("test", "b", tmp_path) is None and find_node("other", "a", tmp_path) is None
        assert os.getsid(run.pid) not in (os.getsid(0), run.pid), "with the terminal of nobody, and it can get none"
        assert await d.start("a") == run, "there is one"
        assert {os.readlink(f"/proc/{run.pid}/fd/{one}") for one in (1, 2)} == {str(run.path / f"{LOG}.log")}
        assert (run.path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
async def test_of_many_starts_at_once_one_begins(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        runs = await asyncio.gather(*(d.start("a") for _ in range(4)))
        assert len({run.pid for run in runs}) == 1
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


async def test_two_nodes_answer_requests_and_end_at_a_word(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            assert {one.order.spec.node for one in (await d.seen()).values()} == {"a", "b"}
            assert [await d.answers() for _ in range(4)] == [200] * 4
            assert [node.id for node in await d.nodes.nodes()] == ["a", "b"]


@pytest.mark.parametrize(
    "killed",
    [
        "control",
        pytest.param("control and front door", marks=pytest.mark.slow),
        pytest.param("front door", marks=pytest.mark.slow),
    ],
)
async def test_a_part_that_is_killed_costs_no_stage_and_comes_again(tmp_path: Path, killed: str) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            before, first_door = await d.seen(), door(d)
            if "control" in killed:
                control = part(d, "a", "control")
                os.kill(control, signal.SIGKILL)
            if "front door" in killed:
                os.kill(first_door, signal.SIGKILL)
            if "control" in killed:
                await until(lambda: part(d, "a", "control") not in (0, control))
            if "front door" in killed:
                await until(lambda: d.doors.pids and first_door not in d.doors.pids.values())
            else:
                assert [await d.answers() for _ in range(4)] == [200] * 4
                await until(lambda: [*d.doors.pids.values()] == [first_door], "it is found again")
            async with asyncio.timeout(60):
                await d.doors.seen()
            assert await d.answers() == 200
            after = await d.up(*wanted)
            assert {name: one.pid for name, one in after.items()} == {name: one.pid for name, one in before.items()}


@pytest.mark.slow
async def test_a_node_process_that_is_killed_is_followed_by_one_with_nothing(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            before, killed = await d.seen(), d.runs["b"]
            os.kill(killed.pid, signal.SIGKILL)
            run = await d.start("b")
            assert run.pid != killed.pid and not killed.path.exists()
            d.join("b")

            async def begun_again() -> bool:
                return all(
                    one.pid != before[name].pid for name, one in (await d.seen()).items() if one.order.spec.node == "b"
                )

            await until(begun_again)
            after = await d.up(*wanted)
            assert all(one.pid == before[name].pid for name, one in after.items() if one.order.spec.node == "a")

            async def served() -> bool:
                return await d.answers() == 200

            await until(served)


async def test_with_its_owner_a_node_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            d.owner.kill()
            await until(lambda: not d.processes(), "no process")
            await until(lambda: not d.left(), "nothing left")
        assert reap_dead(tmp_path) == [] and find_node("test", "a", tmp_path) is None


async def test_what_a_killed_node_process_leaves_is_cleaned_up_by_whoever_starts_next(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        run = await d.start("a")
        d.join("a")
        await d.nodes.start(d.orders("a")[0])
        os.kill(run.pid, signal.SIGKILL)
        await until(lambda: not run.lives)
        assert run.path.exists()
        assert reap_dead(tmp_path) == [run.path.name]
        assert not d.left()


@pytest.mark.slow
async def test_one_of_another_owner_is_ended_first(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d, deployment(tmp_path) as other:
        run = await d.start("a")
        another = await other.start("a")
        assert another.pid != run.pid and not run.lives
        assert find_node("test", "a", tmp_path) == another


async def test_what_is_wrong_with_it_is_said_to_whoever_starts_it(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        await d.start("a", front=True)
        with pytest.raises(ConfigError) as caught:  # the port
            await d.start("b", front=True)
        assert caught.value.param == "--port"
        with pytest.raises(ConfigError):
            await asyncio.to_thread(start_node, replace(d.setup("c", front=False), shm_mib=1))
        assert find_node("test", "b", tmp_path) is None
        d.runs.pop("b", None)
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
async def test_it_is_ended_by_force_where_it_does_not_end(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        run = await d.start("a")
        os.kill(run.pid, signal.SIGSTOP)
        await asyncio.to_thread(end_node, run, 0.2)
        assert not run.lives and not run.path.exists()


def test_a_node_process_is_to_the_kernel_what_its_owner_is() -> None:
    """And not what is made of the workers of a cluster: nice, and the first to be ended where memory is short."""
    code = (
        "import os, pathlib; from deploy.node.process import _take_after\n"
        "os.nice(7); mine = pathlib.Path('/proc/self/oom_score_adj'); mine.write_text('900')\n"
        "warnings = _take_after(os.getppid())\n"
        "print(os.getpriority(os.PRIO_PROCESS, 0), mine.read_text().strip(), len(warnings))"
    )
    told = subprocess.check_output([sys.executable, "-c", code], env=module_environment(), text=True).split()
    nice, memory, warnings = map(int, told)
    as_owner = [
        nice == os.getpriority(os.PRIO_PROCESS, 0),
        memory == int(Path("/proc/self/oom_score_adj").read_text()),
    ]
    assert warnings == as_owner.count(False), "what could not be had is said"
    assert all(as_owner) or os.geteuid() != 0
