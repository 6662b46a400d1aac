"""What is leased and what is wanted stay in step, whatever happens to nodes and to the controller."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.control import controller
from deploy.control.changes import State
from deploy.control.refusals import RefusedError
from deploy.runtime.leases import LeaseError
from deploy.runtime.protocol import Phase
from epd_serve.errors import EpdError
from epd_serve.roles import Role
from tests.deploy.control.cluster import Cluster
from tests.waiting import until


async def test_a_layout_is_started_on_what_is_leased_for_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 2, "b": 2})
    async with cluster.running():
        await cluster.whole()
        assert list(cluster.up()) == ["D0", "E0", "P0"]
        status = await cluster.controller.status()
        assert sum(len(node["ours"]) for node in status["nodes"]) == 3
        assert [node["id"] for node in status["nodes"]] == ["a", "b"] and status["state"] == "steady"


async def test_more_than_there_is_is_refused_with_what_is_missing_and_what_each_node_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 2, "b": 2})
    cluster.leases.others = {"a": 2}
    with pytest.raises(LeaseError) as refused:
        await cluster.begin()
    assert (refused.value.missing, refused.value.free) == ((1,), {"a": 0, "b": 2})
    assert await cluster.leases.places() == ()


async def test_what_was_lost_with_a_node_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 2, "b": 2, "c": 2})
    async with cluster.running():
        await cluster.whole()
        before = cluster.up()
        lost = [name for name, node in before.items() if node == "b"]
        cluster.runtime.calls.clear()
        cluster.dies("b")
        await until(lambda: len(cluster.up()) == 3)
        await cluster.whole()
        assert sorted(cluster.runtime.calls) == sorted(f"start {name}" for name in lost)
        assert {name: node for name, node in cluster.up().items() if name not in lost} == {
            name: node for name, node in before.items() if name not in lost
        }
        replaced = cluster.reconciler.changes.past[-1]
        assert (replaced.what, replaced.state, replaced.layout) == ("replace", State.DONE, "E-P-D")


async def test_what_has_no_place_waits_says_for_what_and_comes_when_a_node_does(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-2D", {"a": 3, "b": 1})
    async with cluster.running():
        await cluster.whole()
        (gone,) = (name for name, node in cluster.up().items() if node == "b")
        cluster.dies("b")
        await until(lambda: cluster.reconciler.wanted.waiting)
        status = await cluster.controller.status()
        assert status["state"] == "degraded" and status["trouble"] == "waits for a node with room"
        assert gone not in cluster.up() and len(cluster.up()) == 3 and cluster.doors.roles >= {"E", "P", "D"}
        another = cluster.comes(1)
        await until(lambda: cluster.up().get(gone) == another)
        await cluster.whole()
        status = await cluster.controller.status()
        assert status["state"] == "steady" and status["past"][-1]["what"] == "replace"


async def test_a_node_that_is_silent_keeps_its_instances_until_it_is_said_to_be_dead(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 2, "b": 2})
    async with cluster.running():
        await cluster.whole()
        before = cluster.up()
        cluster.runtime.calls.clear()
        cluster.runtime.silent.add("b")
        cluster.runtime.changed.set()
        await until(lambda: any(one.phase == "down" for one in cluster.reconciler.instances))
        assert (await cluster.controller.status())["state"] == "degraded"
        await asyncio.sleep(0.1)
        assert cluster.runtime.calls == []
        cluster.runtime.silent.clear()
        cluster.runtime.changed.set()
        await cluster.whole()
        assert cluster.up() == before


async def test_a_dry_run_leases_nothing_and_says_where(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 2, "b": 2})
    async with cluster.running():
        await cluster.whole()
        cluster.leases.calls.clear()
        told = await cluster.controller.relayout("2E-P-D", dry_run=True)
        assert told["plan"]["waves"] == [
            [{"action": "start", "instance": "E1", "role": "E", "node": "b", "devices": [1]}]
        ]
        cluster.leases.others["b"] = 1
        with pytest.raises(RefusedError) as refused:
            await cluster.controller.relayout("2E-P-D", dry_run=True)
        assert refused.value.code == "no_devices" and refused.value.details["free"] == {"a": 0, "b": 0}
        assert cluster.leases.calls == []


async def test_what_a_command_has_not_got_is_wanted_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 3})
    async with cluster.running():
        await cluster.whole()
        with pytest.raises(RefusedError):
            await cluster.controller.relayout("E-P-3D", dry_run=True)
        assert cluster.leases.wanted == ()
        with pytest.raises(RefusedError):
            await cluster.controller.relayout("E-P-3D")
        assert cluster.leases.wanted == (1, 1)
        monkeypatch.setattr(controller, "REFUSED_S", 0.01)
        with pytest.raises(RefusedError):
            await cluster.controller.relayout("E-2P-D")
        await until(lambda: cluster.leases.wanted == (), "it to be taken back")


async def test_a_start_takes_as_long_as_on_its_node_or_as_on_the_slowest_other(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 3, "b": 1, "c": 1})
    cluster.runtime.start_s = {"a": {Role.E: 2.0, Role.P: 3.0}, "b": {Role.E: 7.0}}
    async with cluster.running():
        await cluster.whole()
        assert set(cluster.up().values()) == {"a"}
        told = await cluster.controller.relayout("2E-P-D", dry_run=True)
        assert told["plan"]["expected_s"] == 7.0, "it comes to b"
        cluster.dies("b")
        told = await cluster.controller.relayout("E-2P-D", dry_run=True)
        assert told["plan"]["expected_s"] == 3.0, "c has started none yet"
        told = await cluster.controller.relayout("E-P-2D", dry_run=True)
        assert told["plan"]["expected_s"] is None


async def test_what_was_leased_for_a_change_that_is_refused_is_given_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "EP-D", {"a": 2, "b": 2})
    cluster.doors.room_s = 1.0
    async with cluster.running():
        await cluster.whole()
        cluster.runtime.fate = lambda name: "fails"
        begun = await cluster.controller.relayout("E-P-D")
        assert begun["change"] is not None and len(await cluster.leases.places()) == 4, "beside those who leave"
        await cluster.reconciler.changes.over()
        assert cluster.reconciler.changes.past[-1].state is State.FAILED
        await cluster.whole()
        assert sorted(cluster.up()) == ["D0", "EP0"]


async def test_who_leaves_keeps_his_place_until_he_has_gone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "EP-D", {"a": 2, "b": 2})
    async with cluster.running():
        await cluster.whole()
        lease = cluster.doors.give("EP0")
        await cluster.controller.relayout("E-P-D")
        await until(lambda: "EP0" in cluster.doors.given_nothing)
        await asyncio.sleep(0.1)
        assert len(await cluster.leases.places()) == 4
        lease.release()  # type: ignore[attr-defined]
        await cluster.whole()
        assert len(await cluster.leases.places()) == 3


async def test_where_nothing_is_free_it_goes_to_the_devices_of_those_who_leave(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "2EPD", {"a": 2})
    async with cluster.running():
        await cluster.whole()
        await cluster.controller.relayout("P-D")
        await cluster.whole()
        assert list(cluster.up()) == ["D0", "P0"] and len(await cluster.leases.places()) == 2


@pytest.mark.parametrize("command", ["goes on", "undo"])
async def test_a_change_in_which_a_node_dies_goes_on_elsewhere(tmp_path: Path, command: str) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 4, "b": 2, "c": 4})
    async with cluster.running():
        await cluster.whole()
        cluster.runtime.fate = lambda name: "hangs"
        await cluster.controller.relayout("3E-P-2D")
        await until(lambda: len(cluster.runtime.there) == 6)
        cluster.dies("b")
        await until(lambda: len(cluster.runtime.there) == 6)
        change = cluster.reconciler.changes.present
        assert change is not None and (change.what, change.layout) == ("relayout", "3E-P-2D")
        cluster.runtime.fate = lambda name: "up"
        for name in tuple(cluster.runtime.there):
            cluster.runtime.say_up(name)
        if command == "undo":
            await cluster.controller.undo()
        await cluster.whole()
        layout = "3E-P-2D" if command == "goes on" else "E-P-D"
        assert cluster.reconciler.wanted.layout == layout and cluster.reconciler.changes.past[-1].state is State.DONE


async def test_a_replacement_that_does_not_start_has_no_way_back_and_is_tried_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 2, "b": 2, "c": 2})
    async with cluster.running():
        await cluster.whole()
        cluster.runtime.fate = lambda name: "fails"
        cluster.dies("b")
        await until(lambda: cluster.reconciler.changes.past[-1].what == "replace")
        failed = cluster.reconciler.changes.past[-1]
        assert failed.state is State.FAILED and failed.reason.endswith("did not start: no luck")
        assert (await cluster.controller.status())["state"] == "degraded"
        cluster.runtime.fate = lambda name: "up"
        await cluster.whole()


async def test_another_controller_takes_over_what_is_leased_and_gives_back_what_nobody_knows_of(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "E-P-D", {"a": 2, "b": 2})
    async with cluster.running():
        await cluster.whole()
        before, lives = cluster.up(), cluster.lives
        cluster.leases.after_call = cluster.kill  # between what was leased and what is begun
        await _asked(cluster.controller.relayout("2E-P-D"))
        cluster.leases.after_call = lambda: None
        await until(lambda: cluster.lives > lives)
        await cluster.whole()
        assert before.items() <= cluster.up().items()


EVENTS = (*["change"] * 3, "undo", "dies", "comes", "silent", "luck", "stage", "kill", "kill at a call")
LAYOUTS = ("EPD", "2EPD", "EP-D", "E-P-D", "(E-P)-D", "(E-PD)x2", "2E-2P-2D", "E-P-3D")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_no_path_is_lost_no_device_given_twice_and_no_lease_forgotten(seed: int) -> None:
    """Except by a death itself. `FakeNodes` and `FakeLeases` hold each call against it."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_walk(Path(folder), random.Random(seed)))


async def _walk(folder: Path, chance: random.Random) -> None:
    cluster = Cluster(folder, chance.choice(LAYOUTS), {"a": 4, "b": 3, "c": 2})
    async with cluster.running():
        await cluster.whole()
        for _ in range(chance.randrange(4, 16)):
            await _something(cluster, chance)
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.01, 0.05)))
        while sum(cluster.leases.nodes.values()) < 9:
            cluster.comes(4)
        cluster.runtime.fate = lambda name: "up"
        cluster.runtime.silent.clear()
        cluster.runtime.changed.set()
        await cluster.whole()


async def _something(cluster: Cluster, chance: random.Random) -> None:
    alive = sorted(cluster.leases.nodes)
    up = [name for name, one in cluster.runtime.there.items() if one.phase is Phase.UP]
    match chance.choice(EVENTS):
        case "change":
            await _asked(cluster.controller.relayout(chance.choice(LAYOUTS), dry_run=chance.random() < 0.2))
        case "undo":
            await _asked(cluster.controller.undo())
        case "dies" if len(alive) > 1:
            cluster.dies(chance.choice(alive))
        case "comes" if len(alive) < 4:
            cluster.comes(chance.choice((1, 2, 4)))
        case "silent":
            cluster.runtime.silent ^= {chance.choice(alive)}
            cluster.runtime.changed.set()
        case "luck":
            unlucky = chance.choice((0.0, 0.5))
            cluster.runtime.fate = lambda name: "fails" if chance.random() < unlucky else "up"
        case "stage" if up:
            name = chance.choice(up)
            cluster.runtime.say_down(name)
            asyncio.get_running_loop().call_later(chance.choice((0.0, 0.05)), cluster.runtime.say_up, name)
        case "kill":
            cluster.kill()
        case "kill at a call":
            _kill_at_a_call(cluster)


async def _asked(command: Awaitable[object]) -> None:
    """By an operator who does not wait for ever, of a controller that may die."""
    task = asyncio.ensure_future(command)
    await asyncio.wait([task], timeout=0.3)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        assert isinstance(error, EpdError), error


def _kill_at_a_call(cluster: Cluster) -> None:
    """Once it has taken effect, and before it is answered."""

    def die() -> None:
        cluster.runtime.after_call = cluster.leases.after_call = lambda: None
        cluster.kill()
        raise asyncio.CancelledError

    cluster.runtime.after_call = cluster.leases.after_call = die
