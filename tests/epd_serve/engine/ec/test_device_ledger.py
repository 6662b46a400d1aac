"""The ledger: every fetch ends once, a place is reused only when no rank can still write to it, pins never leak."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve import wire
from epd_serve.engine.ec.device_ledger import DevicePin, Failed, FetchLedger, Pinned
from epd_serve.engine.ec.device_slab import SlabBook
from epd_serve.engine.ec.device_trailer import TRAILER_BYTES

RANKS, WAIT_S, CAPACITY = 3, 5.0, 16 << 10
KEYS = st.sampled_from("abcdef")


class Ledger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = FetchLedger(SlabBook(CAPACITY), RANKS, WAIT_S, self.unpin)
        self.now = 0.0
        self.pins: list[DevicePin] = []
        self.asked: dict[str, int] = {}  # fetches that must end, by key
        self.writing: dict[tuple[int, int], wire.FetchInto] = {}  # (rank, seq) → what it may still write
        self.unanswered: set[tuple[int, int]] = set()

    def unpin(self, pin: DevicePin) -> None:
        self.ledger.release(pin)

    def _after(self) -> None:
        for message in self.ledger.outgoing:
            for rank in range(RANKS):
                self.writing[rank, message.seq] = message
                self.unanswered.add((rank, message.seq))
        self.ledger.outgoing.clear()
        for event in self.ledger.events:
            key = event.pin.key if isinstance(event, Pinned) else event.key
            assert self.asked.pop(key), "an event that nobody waits for"
            if isinstance(event, Pinned):
                self.pins.append(event.pin)
            else:
                assert isinstance(event, Failed) and event.cause
        self.ledger.events.clear()

    @rule(key=KEYS, nbytes=st.sampled_from([0, 1000, 3000, 9000]))
    def fetch(self, key: str, nbytes: int) -> None:
        self.asked[key] = 1
        self.ledger.fetch(key, nbytes, self.now)
        self._after()

    @rule(key=KEYS)
    def try_local(self, key: str) -> None:
        pin = self.ledger.try_local(key)
        if pin is not None:
            self.pins.append(pin)

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data(), how=st.sampled_from(["fetched", "missing", "late", "size"]))
    def answer(self, data: st.DataObject, how: str) -> None:
        rank, seq = data.draw(st.sampled_from(sorted(self.unanswered)))
        self.unanswered.discard((rank, seq))
        if how == "fetched":
            del self.writing[rank, seq]
            self.ledger.fetched(rank, wire.Fetched(seq, 1000, [1000], "uint8"), self.now)
        elif how == "late":
            self.ledger.failed(rank, wire.FetchFailed(seq, "unavailable", "late", False), self.now)
        else:
            room = self.writing.pop((rank, seq)).capacity
            nbytes = room + 1000 - TRAILER_BYTES if how == "size" else 0
            self.ledger.failed(rank, wire.FetchFailed(seq, how, "so", True, nbytes), self.now)
        self._after()

    @precondition(lambda self: set(self.writing) - self.unanswered)
    @rule(data=st.data())
    def late_transfer_ends(self, data: st.DataObject) -> None:
        rank, seq = data.draw(st.sampled_from(sorted(set(self.writing) - self.unanswered)))
        del self.writing[rank, seq]
        self.ledger.settled(rank, wire.FetchSettled(seq))
        self._after()

    @rule(seq=st.integers(0, 40), rank=st.integers(0, RANKS - 1))
    def answers_that_nobody_asked_for_or_twice(self, seq: int, rank: int) -> None:
        if (rank, seq) not in self.writing:
            self.ledger.fetched(rank, wire.Fetched(seq, 1000, [1000], "uint8"), self.now)
            self.ledger.settled(rank, wire.FetchSettled(seq))
            self._after()

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))).release()

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        self._after()

    @invariant()
    def nobody_writes_where_another_does_or_where_a_feature_is_pinned(self) -> None:
        attempts = {message.seq: message for message in self.writing.values()}
        taken = [(message.offset, message.offset + message.capacity) for message in attempts.values()]
        taken += {(pin.offset, pin.offset + pin.nbytes) for pin in self.pins}
        taken.sort()
        for before, after in itertools.pairwise(taken):
            assert before[1] <= after[0], f"{before} and {after} overlap"

    def teardown(self) -> None:
        self.now += 2 * WAIT_S
        self.ledger.expire(self.now)
        self._after()
        assert not self.asked, "a fetch that never ended"
        for rank, seq in sorted(self.writing):
            self.ledger.settled(rank, wire.FetchSettled(seq))
        for pin in self.pins:
            pin.release()
        assert self.ledger.book.pinned_bytes == 0, "a place leaked"


Ledger.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedger = Ledger.TestCase


def test_ranks_that_disagree_about_a_feature_make_it_corrupt() -> None:
    ledger = FetchLedger(SlabBook(CAPACITY), 2, WAIT_S, lambda pin: None)
    ledger.fetch("k", 1000, 0.0)
    ledger.fetched(0, wire.Fetched(1, 1000, [1000], "uint8"), 0.0)
    ledger.fetched(1, wire.Fetched(1, 1000, [10, 100], "uint8"), 0.0)
    (event,) = ledger.events
    assert isinstance(event, Failed) and event.cause == "corrupt"
    assert ledger.book.used_bytes == 0


def test_a_feature_whose_size_was_guessed_keeps_only_what_it_needs() -> None:
    ledger = FetchLedger(SlabBook(CAPACITY), 1, WAIT_S, lambda pin: None)
    ledger.fetch("k", 0, 0.0)
    assert ledger.outgoing[0].capacity > 1000 + TRAILER_BYTES
    ledger.fetched(0, wire.Fetched(1, 500, [500], "uint8"), 0.0)
    assert ledger.book.used_bytes == 1024
