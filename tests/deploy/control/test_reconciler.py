"""The reconciler on a deployment in memory: what it does in which order, what it undoes, what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.control.changes import RECORD, Deadlines, State
from deploy.front.occupancy import until_quiet
from epd_serve.errors import StageError
from epd_serve.roles import Role
from proxy.registry.instance_state import Work
from tests.deploy.control.world import MIB, World, wanted
from tests.waiting import until


async def test_the_first_start_is_a_change_like_any_other(tmp_path: Path) -> None:
    world = World(tmp_path, "(E-P)-D")
    async with world.running():
        await world.over()
        assert world.up() == ["D0", "E0", "P0"] and world.last() is State.DONE
        assert world.doors.roles == {Role.E, Role.P, Role.D}
        await until(lambda: all(view.up for view in world.doors.table.snapshot()))


async def test_a_first_start_that_fails_ends_the_launch(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    world.runtime.fate = lambda name: "fails" if name == "P0" else "up"
    with pytest.raises(StageError, match="P0 did not start: no luck") as caught:
        async with asyncio.timeout(60):
            await world.reconciler.run()
    assert caught.value.stage == "P0"


async def test_the_first_start_has_as_much_time_as_the_runtime_gives_it(tmp_path: Path) -> None:
    """Stages that start one after another on a device take their time together."""
    world = World(tmp_path, "E-P-D", Deadlines(start_s=0.02, drain_s=0.02, look_s=0.01))
    world.runtime.fate = lambda name: "hangs" if name == "D0" else "up"
    async with world.running():
        await _stays(lambda: world.reconciler.changes.present is not None)
        world.runtime.say_up("D0")
        await world.over()
        assert world.last() is State.DONE


async def test_one_more_encoder_and_one_less(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    async with world.running():
        await world.over()
        await world.wants("2E-P-D")
        assert world.up() == ["D0", "E0", "E1", "P0"]
        world.runtime.calls.clear()
        await world.wants("E-P-D")
        (gone,) = {"E0", "E1"} - set(world.up())
        assert world.runtime.calls == [f"drain {gone}", f"stop {gone}"]
        assert gone not in {view.instance.id for view in world.doors.table.snapshot()}


async def test_the_same_layout_again_does_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    async with world.running():
        await world.over()
        world.runtime.calls.clear()
        await world.wants("E-P-D")
        assert world.runtime.calls == [] and world.last() is State.DONE


async def test_an_instance_is_stopped_when_its_requests_its_leases_and_its_reports_say_so(tmp_path: Path) -> None:
    world = World(tmp_path, "E-2P-D")
    async with world.running():
        await world.over()
        leases = {name: world.doors.give(name, Work.PREFILL) for name in ("P0", "P1")}
        world.doors.open_transfers = {"P0": 1, "P1": 1}
        world.doors.busy = {"P0": 1, "P1": 1}
        world.begin("E-P-D")
        (gone,) = await until(lambda: world.doors.given_nothing)
        await _stays(lambda: gone in world.runtime.there)
        leases[gone].release()  # type: ignore[attr-defined]
        await _stays(lambda: gone in world.runtime.there)
        world.doors.busy.clear()
        await _stays(lambda: gone in world.runtime.there)
        world.doors.open_transfers.clear()
        await world.over()
        assert gone not in world.runtime.there and world.reconciler.changes.past[-1].cut == 0


async def test_a_drain_that_takes_too_long_cuts_what_is_left_and_counts_it(tmp_path: Path) -> None:
    world = World(tmp_path, "2PD", Deadlines(drain_s=0.05, retry_s=0.01, look_s=0.01))
    async with world.running():
        await world.over()
        for name in ("PD0", "PD1"):
            for _ in range(3):
                world.doors.give(name)
        await world.wants("PD")
        assert world.reconciler.changes.past[-1].cut == 3 and "3 requests are cut off" in world.said[-1]


async def test_a_start_that_fails_is_tried_once_more(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    fates = {"E1": iter(["fails", "up"])}
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: next(fates.get(name, iter([])), "up")
        await world.wants("2E-P-D")
        assert world.last() is State.DONE and len(world.up()) == 4


async def test_a_start_that_fails_twice_goes_back_to_what_was_wanted_before(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: "fails"
        await world.wants("2E-P-2D")
        assert world.last() is State.FAILED and "did not start: no luck" in world.reconciler.changes.past[-1].reason
        assert world.up() == ["D0", "E0", "P0"] and sorted(world.runtime.there) == ["D0", "E0", "P0"]
        assert world.reconciler.layouts == ("E-P-D",)


async def test_a_start_that_hangs_goes_back_when_its_time_is_over(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D", Deadlines(start_s=0.1, retry_s=0.01, look_s=0.01))
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: "hangs"
        await world.wants("2E-P-D")
        assert world.last() is State.FAILED and "--startup-timeout-s" in world.reconciler.changes.past[-1].reason
        assert sorted(world.runtime.there) == ["D0", "E0", "P0"]


async def test_a_way_back_that_fails_is_said_and_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path, "PD", host_bytes=8 * MIB)
    world.runtime.room_bytes = 10 * MIB
    broken = True
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: "fails" if broken else "up"
        await world.wants("EPD", pause_s=60.0)
        assert world.last() is State.FAILED and world.reconciler.trouble
        broken = False
        await until(lambda: world.up() == ["PD0"])
        await until(lambda: not world.reconciler.trouble)
        await until(lambda: world.doors.resumed == 1)


async def test_what_does_not_fit_beside_waits_in_a_pause(tmp_path: Path) -> None:
    world = World(tmp_path, "PD", host_bytes=8 * MIB)
    world.runtime.room_bytes = 10 * MIB
    async with world.running():
        await world.over()
        world.runtime.calls.clear()
        await world.wants("EPD", pause_s=30.0)
        assert world.last() is State.DONE and world.up() == ["EPD0"]
        assert world.runtime.calls == ["drain PD0", "stop PD0", "start EPD0"]
        assert world.doors.paused == [30.0] and world.doors.resumed == 1
        assert world.reconciler.changes.past[-1].paused_s > 0 and world.reconciler.paused_s == 0


async def test_prefill_becomes_decode_when_it_is_quiet_and_decode_prefill_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, "2P-2D", both=True)
    async with world.running():
        await world.over()
        leases = [world.doors.give(name, Work.PREFILL) for name in ("P0", "P1")]
        world.runtime.calls.clear()
        world.begin("P-3D")
        await until(lambda: world.doors.given_nothing)
        await _stays(lambda: not world.runtime.calls)
        for lease in leases:
            lease.release()  # type: ignore[attr-defined]
        await world.over()
        (flip,) = world.runtime.calls
        assert flip in ("flip P0 D", "flip P1 D") and not world.doors.given_nothing
        world.runtime.calls.clear()
        await world.wants("2P-2D")
        assert len(world.runtime.calls) == 1 and world.runtime.calls[0].endswith(" P")


async def test_undone_midway_who_drains_is_taken_back(tmp_path: Path) -> None:
    world = World(tmp_path, "2PD")
    async with world.running():
        await world.over()
        leases = [world.doors.give(name) for name in ("PD0", "PD1")]
        world.begin("PD")
        await until(lambda: world.doors.given_nothing)
        await world.wants("2PD")
        assert world.up() == ["PD0", "PD1"] and not world.doors.given_nothing
        assert [change.state for change in world.reconciler.changes.past] == [State.DONE, State.UNDONE, State.DONE]
        assert "stop PD0" not in world.runtime.calls and "stop PD1" not in world.runtime.calls
        del leases


async def test_one_that_is_not_wanted_any_more_is_replaced_by_its_like(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    async with world.running():
        await world.over()
        world.runtime.calls.clear()
        world.reconciler.begin("restart", world.reconciler.wanted, unwanted=["P0"])
        await world.over()
        assert world.runtime.calls == ["start P1", "drain P0", "stop P0"] and world.up() == ["D0", "E0", "P1"]


@pytest.mark.parametrize("call", ["start E1", "drain E1", "stop E1"])
async def test_a_call_whose_answer_is_lost_is_repeated(tmp_path: Path, call: str) -> None:
    world = World(tmp_path, "E-P-D")
    async with world.running():
        await world.over()
        world.runtime.lost.add(call)
        await world.wants("2E-P-D")
        await world.wants("E-P-D")
        assert world.last() is State.DONE and len(world.up()) == 3


async def test_a_stage_that_dies_in_a_change_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path, "EP-D")
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: "hangs"
        world.begin("EPD")
        await until(lambda: "EPD0" in world.runtime.there)
        world.runtime.say_down("D0")
        world.runtime.say_up("EPD0")
        await world.over()
        assert world.up() == ["EPD0"]


async def test_another_controller_goes_on_with_what_is_written(tmp_path: Path) -> None:
    world = World(tmp_path, "2PD")
    async with world.running():
        await world.over()
        leases = [world.doors.give(name) for name in ("PD0", "PD1")]
        world.begin("PD")
        await until(lambda: world.doors.given_nothing)
    record = world.journal.read()
    assert record is not None and record.layouts == ("2PD", "PD")
    assert record.change is not None and record.change.number == 1
    world.follow()
    async with world.running():
        for lease in leases:
            lease.release()  # type: ignore[attr-defined]
        await world.over()
        assert len(world.up()) == 1 and world.reconciler.layouts == ("2PD", "PD")
        assert world.last() is State.DONE and world.reconciler.changes.latest.number == 1


@pytest.mark.parametrize(
    ("first", "then", "pause_s", "options"),
    [
        ("E-P-D", "2E-P-D", 0.0, {}),
        ("2E-P-D", "E-P-D", 0.0, {}),
        ("EP-D", "E-P-D", 0.0, {}),
        ("2P-2D", "3P-D", 0.0, {"both": True}),
        ("2P-2D", "P-3D", 0.0, {"both": True}),
        ("PD", "EPD", 60.0, {"host_bytes": 8 * MIB}),
    ],
)
async def test_a_controller_killed_at_any_call_is_followed_by_one_that_finishes(
    tmp_path: Path, first: str, then: str, pause_s: float, options: dict[str, Any]
) -> None:
    calls = 1
    at = 0
    while at < calls:
        world = World(tmp_path, first, **options)
        world.runtime.room_bytes = 10 * MIB if pause_s else None
        async with world.running():
            await world.over()
            world.runtime.calls.clear()
            died = asyncio.Event()

            def die(world: World = world, died: asyncio.Event = died, at: int = at) -> None:
                if len(world.runtime.calls) == at + 1 and not died.is_set():
                    died.set()
                    raise asyncio.CancelledError

            world.runtime.after_call = die
            world.begin(then, pause_s=pause_s)
            async with asyncio.timeout(60):
                await died.wait()
        world.follow()
        async with world.running():
            await world.over()
            assert world.last() is State.DONE, (at, world.runtime.calls)
            assert world.reconciler.changes.latest.number == 1 and not world.doors.given_nothing
            roles = sorted(one.order.spec.role.value for one in world.runtime.there.values())
            assert roles == sorted(spec.role.value for spec in wanted(then).specs)
            assert not world.reconciler.paused_s
        at, calls = at + 1, max(calls, len(world.runtime.calls))
        (tmp_path / RECORD).unlink()


async def test_a_prefill_of_which_nothing_was_heard_yet_is_not_quiet(tmp_path: Path) -> None:
    world = World(tmp_path, "P-D")
    async with world.running():
        await world.over()
        instance = world.doors.table.instance("P0")
        world.doors.table.apply(replace(instance, incarnation="another"))
        quiet = asyncio.create_task(until_quiet(world.doors.table, world.doors.seen, "P0"))
        world.doors.report = lambda: None  # type: ignore[method-assign]
        await _stays(lambda: not quiet.done())
        del world.doors.report  # type: ignore[method-assign]
        await until(quiet.done)


async def test_a_pause_is_told_again_by_who_follows(tmp_path: Path) -> None:
    world = World(tmp_path, "PD", host_bytes=8 * MIB)
    world.runtime.room_bytes = 10 * MIB
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: "hangs"
        world.begin("EPD", pause_s=60.0)
        await until(lambda: "EPD0" in world.runtime.there)
    world.doors.paused.clear()
    world.follow()
    async with world.running():
        await until(lambda: world.doors.paused)
        assert 50.0 < world.doors.paused[0] <= 60.0
        world.runtime.say_up("EPD0")
        await world.over()
        assert world.last() is State.DONE and world.doors.resumed == 1


async def test_a_change_that_cannot_be_finished_by_who_follows_goes_back(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: "hangs"
        world.begin("3E-P-D")
        await until(lambda: {"E1", "E2"} <= world.runtime.there.keys())
    for name in ("E1", "E2"):
        world.runtime.fails(name)
    world.runtime.fate = lambda name: "fails"
    world.follow()
    async with world.running():
        await world.over()
        assert world.last() is State.FAILED and world.up() == ["D0", "E0", "P0"]
        assert world.reconciler.layouts == ("E-P-D",)


async def _stays(condition: Callable[[], bool]) -> None:
    """It is so, and still after the reconciler has looked several times."""
    for _ in range(20):
        assert condition()
        await asyncio.sleep(0.01)
