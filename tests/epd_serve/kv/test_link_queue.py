"""One link's queue: all that is put comes out once, the urgent first, the end last, and politeness has its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.kv.link_queue import MAX_YIELD_S, LinkQueue

TRANSFERS = "abcd"
NOW = 100.0


@dataclass
class Put:
    """What the test knows of one packet that waits."""

    deadline: float
    nbytes: int
    members: set[str]
    yielded_s: float = 0.0


@dataclass
class Model:
    packets: dict[int, Put] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)


class Queueing(RuleBasedStateMachine):
    """Puts, takes, reprioritises and drops in any order, beside a model that is only a dict and a set."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: LinkQueue[tuple[str, object]] = LinkQueue(seconds=lambda nbytes: nbytes * 1e-3)
        self.model = Model()
        self.now = 0.0
        self.numbers = 0
        self.ended: set[str] = set()

    @rule(
        deadline=st.sampled_from([0.005, 0.01, 0.03, 0.1, 1.0]),
        nbytes=st.integers(0, 20),
        members=st.sets(st.sampled_from(TRANSFERS), min_size=1),
    )
    def put(self, deadline: float, nbytes: int, members: set[str]) -> None:
        members = members - self.ended
        if members:
            self.queue.put(("packet", self.numbers), self.now + deadline, nbytes, members)
            self.model.packets[self.numbers] = Put(self.now + deadline, nbytes, set(members))
            self.numbers += 1

    @rule(member=st.sampled_from(TRANSFERS))
    def put_end(self, member: str) -> None:
        if member not in self.ended:
            self.queue.put_end(member, ("end", member))
            self.ended.add(member)
            self.model.ends.add(member)

    @rule(member=st.sampled_from(TRANSFERS), deadline=st.sampled_from([0.0, 0.02, 2.0]))
    def reprioritise(self, member: str, deadline: float) -> None:
        self.queue.reprioritise(member, self.now + deadline)
        for put in self.model.packets.values():
            if member in put.members:
                put.deadline = min(put.deadline, self.now + deadline)

    @rule(member=st.sampled_from(TRANSFERS))
    def drop(self, member: str) -> None:
        alone = [number for number, put in self.model.packets.items() if put.members == {member}]
        dropped = self.queue.drop(member)
        assert sorted(dropped) == [("packet", number) for number in alone]
        for number in alone:
            del self.model.packets[number]
        for put in self.model.packets.values():
            put.members.discard(member)
        self.model.ends.discard(member)
        self.ended.discard(member)  # its key may be used again

    @rule(later=st.sampled_from([0.0, 0.001, 0.007, 0.05]), quiet=st.sampled_from([0.0, 0.002, 0.01, 0.5]))
    def take(self, later: float, quiet: float) -> None:
        self.now += later
        taken = self.queue.take(self.now, self.now + quiet)
        if taken is None:
            assert not self.model.packets and not self.model.ends
        elif isinstance(taken, float):
            self.yields(taken, quiet)
        elif taken[0] == "end":
            member = taken[1]
            assert not any(member in put.members for put in self.model.packets.values())
            self.model.ends.remove(member)  # KeyError: it came out twice, or after a drop
        else:
            waiting = self.model.packets
            assert min(waiting, key=lambda number: (waiting[number].deadline, number)) == taken[1]
            assert not any(self.ready(member) for member in self.model.ends)
            del waiting[taken[1]]

    def yields(self, wait_s: float, quiet: float) -> None:
        waiting = self.model.packets.values()
        due = min(put.deadline for put in waiting)
        assert 0 < wait_s <= quiet + 1e-9
        assert not any(self.ready(member) for member in self.model.ends)
        assert self.now + wait_s + sum(put.nbytes for put in waiting if put.deadline == due) * 1e-3 <= due + 1e-9
        self.now += wait_s
        for put in waiting:
            put.yielded_s += wait_s
            assert put.yielded_s <= MAX_YIELD_S + 1e-9
        self.take(0.0, quiet)  # nobody waits longer than was said

    def ready(self, member: str) -> bool:
        return not any(member in put.members for put in self.model.packets.values())

    @invariant()
    def members_are_those_with_something_left(self) -> None:
        waiting = set().union(self.model.ends, *(put.members for put in self.model.packets.values()))
        assert self.queue.members() == waiting

    @invariant()
    def backlog_is_what_would_go_first(self) -> None:
        for deadline in (self.now, self.now + 0.02, self.now + 10):
            before = sum(put.nbytes for put in self.model.packets.values() if put.deadline <= deadline)
            assert self.queue.backlog_bytes(deadline) == before

    @precondition(lambda self: self.numbers > 0)
    @rule()
    def everything_comes_out_however_loud_the_others_are(self) -> None:
        for _ in range(10 * (len(self.model.packets) + len(self.model.ends)) + 1):
            self.take(0.0, 10.0)
        assert not self.model.packets and not self.model.ends


TestQueueing = Queueing.TestCase
TestQueueing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_end_waits_for_the_packets_of_its_transfer_only() -> None:
    queue: LinkQueue[str] = LinkQueue()
    queue.put("of both", NOW + 2, 1, "ab")
    queue.put("of a", NOW + 1, 1, "a")
    queue.put_end("a", "end of a")
    queue.put_end("c", "end of c")
    assert [queue.take(NOW) for _ in range(5)] == ["end of c", "of a", "of both", "end of a", None]


def test_reprioritised_packets_overtake_and_keep_their_order() -> None:
    queue: LinkQueue[str] = LinkQueue()
    queue.put("b1", NOW + 1, 1, "b")
    queue.put("a1", NOW + 5, 1, "a")
    queue.put("a2", NOW + 5, 1, "a")
    queue.reprioritise("a", NOW + 1)
    queue.reprioritise("a", NOW + 9)  # never slower
    assert [queue.take(NOW) for _ in range(3)] == ["b1", "a1", "a2"]
    queue.put("b2", NOW + 1, 1, "b")
    queue.put("a3", NOW + 5, 1, "a")
    queue.reprioritise("a", NOW + 0.5)
    assert queue.take(NOW) == "a3"


def test_a_packet_of_several_transfers_survives_the_drop_of_one() -> None:
    queue: LinkQueue[str] = LinkQueue()
    queue.put("of both", NOW + 1, 1, "ab")
    queue.put_end("a", "end of a")
    assert queue.drop("a") == []
    assert [queue.take(NOW), queue.take(NOW)] == ["of both", None]


def test_a_packet_yields_until_the_wire_is_quiet_again() -> None:
    queue: LinkQueue[str] = LinkQueue()
    queue.put("packet", NOW + 1, 1, "a")
    assert queue.take(NOW, NOW + 0.005) == pytest.approx(0.005)
    assert queue.take(NOW + 0.005, NOW + 0.005) == "packet"


def test_a_packet_does_not_yield_what_it_needs_to_be_in_time() -> None:
    queue: LinkQueue[str] = LinkQueue(seconds=lambda nbytes: nbytes * 0.001)
    queue.put("first", NOW + 0.010, 3, "a")
    queue.put("second", NOW + 0.010, 5, "a")
    assert queue.take(NOW, NOW + 1) == pytest.approx(0.002)
    assert queue.take(NOW + 0.002, NOW + 1) == "first"
    assert queue.take(NOW + 0.005, NOW + 1) == "second"


def test_all_yields_of_a_packet_together_are_bounded() -> None:
    """Whoever was ahead of it, and however often the wire became busy again."""
    queue: LinkQueue[str] = LinkQueue()
    queue.put("old", NOW + 100, 1, "a")
    assert queue.take(NOW, NOW + 0.015) == pytest.approx(0.015)
    queue.put("urgent", NOW + 50, 1, "b")
    assert queue.take(NOW + 0.015, NOW + 1) == pytest.approx(0.005)
    assert queue.take(NOW + 0.020, NOW + 1) == "urgent"
    assert queue.take(NOW + 0.030, NOW + 1) == "old"


def test_an_end_does_not_yield() -> None:
    queue: LinkQueue[str] = LinkQueue()
    queue.put("packet", NOW + 1, 1, "a")
    queue.put_end("b", "end of b")
    assert queue.take(NOW, NOW + 1) == "end of b"
    assert isinstance(queue.take(NOW, NOW + 1), float)


def test_misuse_is_an_assertion() -> None:
    queue: LinkQueue[str] = LinkQueue()
    with pytest.raises(AssertionError):
        queue.put("nobody's", NOW, 1, ())
    queue.put("packet", NOW, 1, "a")
    queue.put_end("a", "end")
    with pytest.raises(AssertionError):
        queue.put("too late", NOW, 1, "a")
    with pytest.raises(AssertionError):
        queue.put_end("a", "end again")
