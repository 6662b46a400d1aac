"""What an agent notes for the next one: all of it, in order, and before it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from deploy.agent.instances import Kept
from deploy.agent.record import Record
from deploy.agent.records import Records
from deploy.agent.specs import orders
from deploy.agent.wiring import instance_of, wire
from deploy.keeper.in_process import InProcess
from deploy.runtime.messages import Answer, Done, Seen, from_agent
from deploy.runtime.protocol import Node, Phase
from deploy.runtime.stream import line_of
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tag_says_all_of_an_instance(layout: str) -> None:
    for one in kept(layout):
        again = Kept.of_tag(one.tag())
        assert again == one and again.order.spec.stage == one.order.spec.stage
        assert again.order.spec.plan == one.order.spec.plan and again.order.spec.needs == one.order.spec.needs
        assert again.observed().order.spec.stands_for(one.order.spec)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answer_arrives_as_it_was_given(layout: str) -> None:
    told = tuple(one.observed() for one in kept(layout))
    node = Node("local", "npu", (0, 1), {"/dev/shm": 1 << 40}, {Role.E: 0.5, Role.EP: 1.5})
    answers: list[Answer] = [Seen(1, told), Done(2, (node,), {"E0": 7})]
    for answer in answers:
        line = line_of(answer)
        assert line.count(b"\n") == 1 and from_agent.decode(line) == answer


def test_a_tag_of_something_else_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        Kept.of_tag(b"")


class Slow(InProcess):
    """Takes its time, and says which requests it was asked in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.asked: list[tuple[str, str, bytes]] = []
        self.running: set[str] = set()

    async def note(self, name: str, tag: bytes, descriptor: int | None = None) -> None:
        self.asked.append(("note", name, tag))
        await self.goes_on.wait()

    async def forget(self, name: str) -> None:
        self.asked.append(("forget", name, b""))
        await self.goes_on.wait()
        if name in self.running:
            raise ValueError(f"{name} runs")


class Subject:
    """Records of what a test says."""

    def __init__(self) -> None:
        self.keeper = Slow()
        self.now: dict[str, bytes] = {}
        self.told: list[Mapping[str, bytes]] = []
        self._asked_for: Mapping[str, bytes] = {}
        self.records = Records(self.keeper, self._tags, lambda: self.told.append(self._asked_for))

    def _tags(self) -> Mapping[str, bytes]:
        self._asked_for = dict(self.now)
        return self._asked_for


async def test_nothing_is_told_before_it_is_noted() -> None:
    one = Subject()
    one.now = {"P0": b"1"}
    writing = asyncio.create_task(one.records.write())
    await until(lambda: one.keeper.asked)
    one.now = {"P0": b"2"}
    second = asyncio.create_task(one.records.write())
    await asyncio.sleep(0.01)
    assert one.told == [] and not writing.done() and not second.done()
    one.keeper.goes_on.set()
    await asyncio.gather(writing, second)
    assert one.told == [{"P0": b"1"}, {"P0": b"2"}]
    assert one.keeper.asked == [("note", "P0", b"1"), ("note", "P0", b"2")]


async def test_what_has_not_changed_is_not_noted_again_and_what_is_gone_is_forgotten_last() -> None:
    one = Subject()
    one.keeper.goes_on.set()
    one.records.adopt({"P0": b"1", "D0": b"1"})
    one.now = {"P0": b"1", "E0": b"1"}
    await one.records.write()
    await one.records.write()
    assert one.keeper.asked == [("note", "E0", b"1"), ("forget", "D0", b"")]


async def test_what_is_killed_and_not_gone_yet_is_forgotten_as_soon_as_it_is() -> None:
    one = Subject()
    one.keeper.goes_on.set()
    one.keeper.running.add("D0")
    one.records.adopt({"D0": b"1"})
    running = asyncio.create_task(one.records.run())
    await one.records.write()
    one.keeper.running.clear()
    await until(lambda: len(one.keeper.asked) == 2)
    running.cancel()
    await one.records.write()
    assert len(one.keeper.asked) == 2
