"""An agent is killed, whatever it is at: its stages serve on, and the next agent goes on with them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.agent.second_tier import recorded_pool
from deploy.agent.specs import orders
from deploy.host import processes
from deploy.host.logs import KEPT_BYTES
from deploy.host.rundir import read_groups
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.runtime.protocol import Observed, Order, Phase
from epd_serve.peers import Peer
from epd_serve.roles import Role
from tests.deploy.agent_world import World, world_below
from tests.waiting import PATIENCE_S, until

E, P, D = orders(draw(DeployConfig(layout="(E-P)-D", device="cpu", arena_mib=8, kv_staging_mib=4)))
BARE_P, BARE_D = (Order(one.id, replace(one.spec, featured=False)) for one in (P, D))  # they need no arena


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_below(tmp_path) as world:
        yield world


def same_life(one: Observed, other: Observed) -> bool:
    return (one.pid, one.instance, one.restarts) == (other.pid, other.instance, other.restarts)


async def test_what_serves_goes_on_and_is_never_told_to_do_otherwise(world: World) -> None:
    before = await world.up(E, P, D)
    peers = (world.run_path / "peers.json").read_bytes()
    async with world.watched() as told:
        for _ in range(3):
            heard = len(told)
            await world.kill()
            await until(lambda heard=heard: len(told) > heard)
    for all_ in told:
        assert set(all_) == {"E0", "P0", "D0"}
        for name, one in all_.items():
            assert one.phase is Phase.UP and one.serves and same_life(one, before[name]), one
    assert (world.run_path / "peers.json").read_bytes() == peers
    assert told[-1]["D0"].up_s > before["D0"].up_s and told[-1]["D0"].start_s == before["D0"].start_s
    (node,) = await world.runtime.nodes()
    assert set(node.start_s) == {Role.E, Role.P, Role.D}, "how long starts take is known, too"


async def test_the_log_of_a_stage_that_writes_on_is_kept_small(world: World) -> None:
    await world.up(BARE_P)
    log = world.run_path / "P0.log"
    with log.open("ab") as file:
        file.write(b"something, again and again\n" * (3 * KEPT_BYTES // 27))
    await until(lambda: log.stat().st_blocks * 512 < 2 * KEPT_BYTES)
    assert log.stat().st_size > 2 * KEPT_BYTES, "it goes on where it was"


async def test_a_start_goes_on(world: World) -> None:
    world.next_life("P0", "--delay 1.5")
    await world.runtime.start(BARE_P)
    before = (await world.seen(lambda all_: all_["P0"].pid))["P0"]
    await world.kill()
    assert (await world.seen())["P0"].phase is Phase.STARTING
    after = (await world.is_in(Phase.UP, "P0"))["P0"]
    assert same_life(before, after) and after.start_s > 1.4


async def test_a_start_has_no_more_time_than_before(tmp_path: Path) -> None:
    async with world_below(tmp_path, "+startup_timeout_s=3") as world:
        world.next_life("P0", "--delay 600")
        await world.runtime.start(BARE_P)
        await world.seen(lambda all_: all_["P0"].pid)
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(2.0)
        await world.kill()
        one = (await world.seen(lambda all_: all_["P0"].over))["P0"]
        assert "not ready within 3 s" in one.reason
        assert asyncio.get_running_loop().time() - begun < 4.5


async def test_a_start_that_fails_meanwhile_is_over(world: World) -> None:
    world.next_life("P0", "--delay 600")
    await world.runtime.start(BARE_P)
    await world.runs("P0")
    pid = (await world.seen(lambda all_: all_["P0"].pid))["P0"].pid
    assert pid is not None
    await world.kill(pid)
    one = (await world.seen(lambda all_: all_["P0"].over))["P0"]
    assert one.phase is Phase.DOWN and not one.ever_up and one.reason.startswith("killed by SIGKILL")
    await world.kill()
    assert (await world.seen())["P0"].over, "nor does another agent start it again"
    await world.runtime.stop("P0", 1.0)
    await world.up(BARE_P)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_killed_at_any_step_of_a_first_start_that_fails_it_is_over(world: World, when: str) -> None:
    """A life that was cut off before it ran is not the one that fails."""
    fatal, at, killed = world.folder / "fatal", 0, True
    while killed:
        fatal.write_text(f"{at} {when}")
        world.next_life("P0", "--fail 'no such dtype'")
        await world.kill()
        await world.runtime.start(BARE_P)
        one = (await world.is_in(Phase.DOWN, "P0"))["P0"]
        assert one.over and not one.ever_up and "no such dtype" in one.reason
        await world.runtime.stop("P0", 1.0)
        at, killed = at + 1, not fatal.exists()
    assert at > 5


async def test_what_dies_meanwhile_is_started_again(world: World) -> None:
    before = (await world.up(BARE_P, BARE_D))["P0"]
    assert before.pid is not None and before.instance is not None
    await world.kill(before.pid)
    after = (await world.seen(lambda all_: all_["P0"].restarts == 1 and all_["P0"].phase is Phase.UP))["P0"]
    assert after.instance is not None
    assert after.instance.url == before.instance.url and after.instance.incarnation != before.instance.incarnation
    assert (await world.seen())["D0"].restarts == 0


async def test_what_its_group_left_is_cleared_away_before_the_next_life(world: World) -> None:
    world.next_life("P0", "--child")
    await world.runtime.start(BARE_P)
    pid = (await world.is_in(Phase.UP, "P0"))["P0"].pid
    assert pid is not None and len(processes.group_members(pid)) == 2
    await world.kill(pid)
    await world.seen(lambda all_: all_["P0"].restarts == 1 and all_["P0"].phase is Phase.UP)
    assert not processes.group_members(pid)


async def test_a_delay_between_two_lives_goes_on(world: World) -> None:
    pid = (await world.up(BARE_P))["P0"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await world.seen(lambda all_: all_["P0"].retry_in_s)
    await world.kill()
    one = (await world.seen())["P0"]
    assert (one.phase, one.retry_in_s) == (Phase.DOWN, 0.5) and one.reason.startswith("killed by SIGKILL")
    assert (await world.is_in(Phase.UP, "P0"))["P0"].restarts == 1


async def test_delays_grow_across_agents(world: World) -> None:
    await world.up(BARE_P)
    for delay_s in (0.5, 1.0):
        world.next_life("P0", "--fail 'no such dtype'")
        pid = (await world.seen())["P0"].pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        await world.seen(lambda all_, delay_s=delay_s: all_["P0"].retry_in_s == delay_s)
        await world.kill()
    await world.is_in(Phase.UP, "P0")


async def test_what_drains_is_not_started_again(world: World) -> None:
    before = (await world.up(BARE_P))["P0"]
    await world.runtime.drain("P0")
    await world.kill()
    one = (await world.is_in(Phase.DRAINING, "P0"))["P0"]
    assert one.serves and same_life(one, before) and one.pid is not None
    await world.kill(one.pid)
    assert (await world.seen(lambda all_: all_["P0"].over))["P0"].ever_up
    await world.kill()
    await world.runtime.start(BARE_P)
    await world.is_in(Phase.UP, "P0")


async def test_what_drains_can_be_taken_back_by_the_next_agent(world: World) -> None:
    before = (await world.up(BARE_P))["P0"]
    await world.runtime.drain("P0")
    await world.kill()
    await world.runtime.start(BARE_P)
    await world.kill()
    assert same_life((await world.is_in(Phase.UP, "P0"))["P0"], before)


async def test_an_end_goes_on(world: World) -> None:
    world.next_life("P0", "--ignore-term")
    await world.runtime.start(BARE_P)
    pid = (await world.is_in(Phase.UP, "P0"))["P0"].pid
    assert pid is not None
    stopping = asyncio.create_task(world.runtime.stop("P0", 1.0))
    await world.is_in(Phase.STOPPING, "P0")
    await world.kill()
    await asyncio.wait_for(stopping, PATIENCE_S)
    assert await world.seen() == {} and not processes.group_members(pid)


async def test_an_end_has_no_more_time_than_it_was_given(world: World) -> None:
    world.next_life("P0", "--ignore-term")
    await world.up(BARE_P)
    begun = asyncio.get_running_loop().time()
    stopping = asyncio.create_task(world.runtime.stop("P0", 3.0))
    await world.is_in(Phase.STOPPING, "P0")
    for _ in range(2):
        await asyncio.sleep(1.0)
        await world.kill()
    await asyncio.wait_for(stopping, PATIENCE_S)
    assert 3.0 <= asyncio.get_running_loop().time() - begun < 4.5


async def test_a_flip_is_remembered(world: World) -> None:
    both = Order("P0", replace(BARE_P.spec, both=True))
    before = (await world.up(both))["P0"]
    await world.runtime.flip("P0", Role.D)
    peers = (world.run_path / "peers.json").read_bytes()
    await world.kill()
    one = (await world.seen())["P0"]
    assert one.order.spec.role is Role.D and one.instance is not None and one.instance.role is Role.D
    assert one.pid == before.pid and (world.run_path / "peers.json").read_bytes() == peers


async def test_the_arena_stays(world: World) -> None:
    await world.up(E)
    (arena,) = Path("/dev/shm").glob(f"epd-{world.run_path.name}-arena")
    inode = arena.stat().st_ino
    await world.kill()
    await world.up(P)
    assert arena.stat().st_ino == inode


async def test_the_second_tiers_master_goes_on_and_comes_back_on_its_ports(tmp_path: Path) -> None:
    async with world_below(tmp_path, "+mm_store=mooncake") as world:
        await world.up(E)
        before, pool = (await world.runtime.groups())["mooncake_master"], recorded_pool(world.run_path)
        await world.kill()
        assert (await world.runtime.groups())["mooncake_master"] == before
        assert not any("is back" in line for line in world.lines)
        async with world.watched():
            await world.kill(before)
            await until(lambda: any("is back" in line for line in world.lines))
        assert recorded_pool(world.run_path) == pool
        await world.up(P)


async def test_who_asks_something_of_an_agent_that_dies_gets_its_answer(world: World) -> None:
    os.kill(world.agent, signal.SIGSTOP)
    asked = asyncio.create_task(world.runtime.start(BARE_P))
    await asyncio.sleep(0.1)
    assert not asked.done()
    await world.kill()
    await asyncio.wait_for(asked, PATIENCE_S)
    await world.is_in(Phase.UP, "P0")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
async def test_killed_at_any_request_it_makes_the_deployment_ends_up_as_it_was_asked_for(
    world: World, when: str
) -> None:
    """One more request further in each round, until a round makes fewer than that."""
    fatal, at, killed = world.folder / "fatal", 0, True
    while killed:
        fatal.write_text(f"{at} {when}")
        await world.kill()  # a life's requests are counted from its beginning
        async with asyncio.timeout(PATIENCE_S):
            await _a_round(world)
        at, killed = at + 1, not fatal.exists()
    assert at > 20


async def _a_round(world: World) -> None:
    runtime, d1 = world.runtime, Order("D1", BARE_D.spec)
    await world.up(BARE_P, BARE_D, d1)
    await runtime.drain("D1")
    before = await world.is_in(Phase.UP, "P0", "D0")
    pid = before["P0"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await runtime.stop("D1", 0.5)
    found = await world.seen(lambda all_: all_["P0"].restarts == 1 and all_["P0"].phase is Phase.UP)
    assert set(found) == {"P0", "D0"} and same_life(found["D0"], before["D0"])
    assert await runtime.groups() == {name: one.pid for name, one in found.items()}
    for name in ("P0", "D0"):
        await runtime.stop(name, 0.5)
    assert await world.seen() == {} and await runtime.groups() == {}
    assert not any(processes.group_members(group) for group in read_groups(world.run_path))


async def test_who_is_on_other_nodes_is_known_to_the_next_agent(world: World) -> None:
    before = await world.up(BARE_P)
    taker = Peer("D0", Role.D, "b", kv_workers=("tcp://10.0.0.9:21004",))
    await world.runtime.know((taker,))
    told = (world.run_path / "peers.json").read_bytes()
    assert b"tcp://10.0.0.9:21004" in told
    (world.run_path / "peers.json").unlink()
    await world.kill()
    await until(lambda: (world.run_path / "peers.json").exists())
    assert (world.run_path / "peers.json").read_bytes() == told
    assert same_life((await world.seen())["P0"], before["P0"]) and "known peers" not in await world.runtime.groups()
    await world.runtime.know(())
    assert b"D0" not in (world.run_path / "peers.json").read_bytes()
