"""What an agent knows of its instances, for the next one: all of it, and written down before it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import deploy.agent.instances
from deploy.agent.instances import INSTANCES, Instances, Kept
from deploy.agent.specs import orders, specs
from deploy.agent.stage_life import Record
from deploy.agent.wiring import Site, instance_of, wire
from deploy.host.rundir import RunDir
from deploy.host.state import SharedState, State, StateFiles
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.plan.machines import Machine, Machines
from deploy.runtime.node_api import NodeStatus, Seen
from deploy.runtime.protocol import Node, Phase, Spec
from epd_serve.errors import ConfigError
from epd_serve.peers import Peer, Peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from npu_ops.core_grants import CoreGrant, CoreOrder, write_grant
from npu_ops.discovery import DeviceInventory
from tests.deploy.wired import wired
from tests.waiting import until

LAYOUTS = ["(E-P)-D", "2E-P-D", "TP2"]
SHARES = CoreOrder("cpu", "P0", {"E0": 0.25, "P0": 0.75}, (0, 1), report="/run/x/P0.cores{rank}.json")


def kept(layout: str) -> list[Kept]:
    """Of each instance of it, one that has lived."""
    world = wired(layout)
    all_ = [Kept(order, 21000 + number) for number, order in enumerate(orders(world.blueprint))]
    for one in all_:
        one.stage = replace(wire(one.order, world.site, one.port, "life"), core_order=SHARES)
        grants = (CoreGrant(0, 0.5, {"cpu": 2}, {"cpu": 4}, (0, 1)),)
        one.instance = replace(instance_of(one.stage), cores=grants)
        one.record = Record(Phase.UP, "life", 7, 8, 9, 1.5, 2.5, 1.0, ever_up=True, reason="ended: ∅", lives=3)
        one.draining, one.stop_by, one.progress = True, 2.0, "warming up"
    return all_


def instances_of(layout: str, state: State) -> Instances:
    return Instances(wired(layout).site, print, state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_agent_knows_all_of_an_instance(layout: str) -> None:
    files, before = StateFiles.make(), kept(layout)
    first = instances_of(layout, SharedState(files))
    first.kept = {one.order.id: one for one in before}
    first.know((Peer("D7", Role.D, "b", kv_workers=("tcp://b:21004",)),))
    after = instances_of(layout, SharedState(files)).kept
    assert list(after) == [one.order.id for one in before], "in the order of their starts"
    for one, again in zip(before, after.values(), strict=True):
        assert again == one and again.order.spec.stage == one.order.spec.stage
        assert again.order.spec.plan == one.order.spec.plan and again.order.spec.needs == one.order.spec.needs
        assert again.observed().order.spec.stands_for(one.order.spec)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answer_arrives_as_it_was_given(layout: str) -> None:
    told = tuple(one.observed() for one in kept(layout))
    node = Node("local", "npu", (0, 1), {"/dev/shm": 1 << 40}, {Role.E: 0.5, Role.EP: 1.5})
    answer = Seen(1, 2, NodeStatus((node,), told, ("a line",)))
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Seen[NodeStatus]) == answer


def test_something_else_in_the_state_is_an_error() -> None:
    state = SharedState(StateFiles.make())
    state.write(INSTANCES, b"\x01")
    with pytest.raises(msgspec.DecodeError):
        instances_of("(E-P)-D", state)


class Told(SharedState):
    """Says when it is written."""

    def __init__(self, written: Callable[[], None]) -> None:
        super().__init__(StateFiles.make())
        self._written = written

    def write(self, name: str, content: bytes) -> None:
        super().write(name, content)
        self._written()


async def test_nothing_is_told_before_it_is_written_down() -> None:
    """Neither to those who watch, nor is a process told to go on."""
    seen: list[int] = []
    at_writing: list[int] = []
    state = Told(lambda: at_writing.append(len(seen)))
    instances = instances_of("(E-P)-D", state)
    (one, *_) = kept("(E-P)-D")
    watching = asyncio.create_task(_watch(instances, seen))
    instances.note()
    await until(lambda: len(seen) == 1)
    for number in range(3):
        instances.kept[one.order.id] = one
        one.record.lives = 10 + number
        at_writing.clear()
        instances.note()
        written = msgspec.msgpack.decode(state.read(INSTANCES) or b"", type=list[Kept])
        assert [kept.record.lives for kept in written] == [10 + number]
        assert at_writing and set(at_writing) == {len(seen)}, "before anybody could hear of it"
        await until(lambda number=number: len(seen) == 2 + number)
    watching.cancel()


async def _watch(instances: Instances, seen: list[int]) -> None:
    async with contextlib.aclosing(instances.watch()) as items:
        async for item in items:
            seen.append(len(item))


def shared(folder: Path) -> tuple[Instances, Kept, Spec]:
    """An E beside a P on a device of four cores, up on the first of them, and its spec on the first three."""
    first, other = (
        draw(
            DeployConfig(layout="(E-P)-D", device="cpu", core_share=text),
            machines=Machines((Machine("local", DeviceInventory("cpu"), cores=tuple(range(8))),)),
        )
        for text in ("E=0.25,P=0.75", "E=0.75,P=0.25")
    )
    run = RunDir("abcd", folder, folder)
    instances = Instances(Site(run, staging_bytes=8 << 20), print, SharedState(StateFiles.make()))
    one = instances.kept["E0"] = Kept(orders(first)[0], 21000, Record(Phase.UP, "life", 7))
    instances.before_spawn("E0")
    instances.note()
    return instances, one, specs(other)[0]


async def test_a_stage_has_other_cores_once_its_worker_says_so_and_in_its_next_life(tmp_path: Path) -> None:
    instances, one, wanted = shared(tmp_path)
    assert one.order.spec.cores == (0,) and one.order.spec == wanted, "no restart is needed"
    moving = asyncio.create_task(instances.share(one, wanted))
    peers = Peers(StageWiring("E0", Role.E, "life", peers=str(tmp_path / "peers.json")), every_s=0.0)
    await until(lambda: peers.changed() and peers.me.cores == (0, 1, 2))
    assert peers.me.core_share == 0.75 and not moving.done()
    assert one.stage is not None and one.stage.core_order is not None
    write_grant(one.stage.core_order.report, CoreGrant(0, 0.75, {"cpu": 2}, core_ids=(0, 1)))
    await asyncio.sleep(0.2)
    assert not moving.done(), "it does not have all of them"
    grant = CoreGrant(0, 0.75, {"cpu": 3}, core_ids=(0, 1, 2))
    write_grant(one.stage.core_order.report, grant)
    await moving
    assert one.instance is not None and (one.instance.cores, one.instance.core_share) == ((grant,), 0.75)
    await instances.share(one, wanted)  # nothing is left to be done
    instances.before_spawn("E0")
    assert one.stage.core_order is not None and one.stage.core_order.cores == (0, 1, 2)


async def test_a_stage_that_does_not_say_so_is_asked_to_be_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.agent.instances, "OBEYED_S", 0.2)
    instances, one, wanted = shared(tmp_path)
    with pytest.raises(ConfigError, match=r"E0 does not compute on cores 0, 1, 2 within 0.2 s"):
        await instances.share(one, wanted)
    peers = Peers(StageWiring("E0", Role.E, "life", peers=str(tmp_path / "peers.json")), every_s=0.0)
    assert peers.changed() and (peers.me.cores, peers.me.core_share) == ((0,), 0.25)
    assert one.order.spec.cores == (0,) and one.instance is not None and one.instance.core_share == 0.25


async def test_one_that_is_between_two_lives_has_them_in_the_next_one(tmp_path: Path) -> None:
    instances, one, wanted = shared(tmp_path)
    one.record.phase = Phase.DOWN
    await instances.share(one, wanted)
    instances.before_spawn("E0")
    assert one.stage is not None and one.stage.cores == (0, 1, 2)
