"""What an agent knows of its instances, for the next one: all of it, and written down before it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from deploy.agent.instances import INSTANCES, Instances, Kept
from deploy.agent.specs import orders
from deploy.agent.stage_life import Record
from deploy.agent.wiring import instance_of, wire
from deploy.host.state import SharedState, State, StateFiles
from deploy.runtime.node_api import NodeStatus, Seen
from deploy.runtime.protocol import Node, Phase
from epd_serve.peers import Peer
from epd_serve.roles import Role
from npu_ops.core_grants import CoreGrant, CoreOrder
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
