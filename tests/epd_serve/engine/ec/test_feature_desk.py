"""What vLLM is told about requests: every request settles, slots are bounded and come back, pins never leak."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve.engine.ec.feature_desk import Admission, FeatureDesk
from epd_serve.engine.ec.feature_item import FeatureState
from epd_serve.engine.ec.feature_table import PARK_S, FeatureTable
from tests.epd_serve.engine.ec.test_feature_table import FakePin

WAIT, HOLD, LAST_LOOK, RENEW_LIMIT, MOST, LIMIT = 3.0, 5.0, 1.0, 9.0, 2, 2
REQUESTS = [f"r{number}" for number in range(6)]
FAILING = {"r4", "r5"}
NEEDS = {"r0": "a", "r1": "ab", "r2": "bc", "r3": "cde", "r4": "ad", "r5": "e"}


def desk(limit: int = LIMIT) -> FeatureDesk[FakePin]:
    table: FeatureTable[FakePin] = FeatureTable(
        wait_s=WAIT, hold_s=HOLD, max_prefetched_bytes=MOST, last_look_s=LAST_LOOK, renew_limit_s=RENEW_LIMIT
    )
    return FeatureDesk(table, limit)


class Interleavings(RuleBasedStateMachine):
    """A scheduler, a store and encoders that do their worst. Events are dropped by not being drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = desk()
        self.now = 0.0
        self.pins: list[FakePin] = []
        self.store: set[str] = set()
        self.live: set[str] = set()
        self.running: set[str] = set()
        self.recomputing: set[str] = set()
        self.failed: list[str] = []
        self.may_be_read: set[tuple[str, str]] = set()

    # --- vLLM ---

    @rule(request=st.sampled_from(REQUESTS), worth=st.sampled_from([None, 0, 1, 2]))
    def vllm_asks(self, request: str, worth: int | None = None) -> None:
        if request in self.failed:
            return
        self.live.add(request)
        keys = list(NEEDS[request])
        admission = self.desk.admission(request, keys, self.now, must_not_recompute=request in FAILING, worth=worth)
        if admission is Admission.PARTIAL:
            here = self.desk.leading(request, keys, self.now)
            assert worth is not None and worth <= here < len(keys), "nothing to begin with, or nothing to wait for"
            self.may_be_read |= {(request, key) for key in keys[:here]}
            assert self.desk.partial == request
        states = {key: self.desk.table.need(request, key, self.now) for key in keys}
        if admission is Admission.RUN:
            assert set(states.values()) <= {FeatureState.READY, FeatureState.LOST}
            assert all((states[key] is FeatureState.READY) == (self.desk.table.pinned(key) is not None) for key in keys)
            lost = FeatureState.LOST in states.values()
            assert not (lost and request in FAILING), "asked to recompute what it must not"
            self.running.add(request)
            self.may_be_read |= {(request, key) for key in keys if states[key] is FeatureState.READY}
            (self.recomputing.add if lost else self.recomputing.discard)(request)
        else:
            self.recomputing.discard(request)
        if admission is Admission.FAIL:
            failure = self.desk.failure(request, keys)
            assert failure.keys and failure.cause
            self.failed.append(request)

    @rule()
    def vllm_takes_the_failed(self) -> None:
        taken = self.desk.take_failed()
        assert taken <= set(self.failed), "named twice, or never failed"
        for request in taken:
            self._finish(request)

    @rule(request=st.sampled_from(REQUESTS))
    def a_request_finishes_or_is_aborted(self, request: str) -> None:
        self._finish(request)

    def _finish(self, request: str) -> None:
        self.desk.ended(request)
        self.desk.release([request, "unknown"])
        for known in (self.live, self.running, self.recomputing):
            known.discard(request)
        self.may_be_read = {(reader, key) for reader, key in self.may_be_read if reader != request}
        if request in self.failed:
            self.failed.remove(request)

    @rule(request=st.sampled_from(REQUESTS))
    def a_prefill_passes_its_items(self, request: str) -> None:
        """Or a prefix cache that has them all spares it the wait."""
        if request in self.live and request not in self.failed:
            self.desk.passed(request)
            self.running.add(request)
            self.recomputing.discard(request)

    # --- the store and its listener ---

    @rule(key=st.sampled_from("abcde"), there=st.booleans())
    def the_store_changes(self, key: str, there: bool) -> None:
        (self.store.add if there else self.store.discard)(key)

    @rule()
    def the_listener_looks(self) -> None:
        doubted = set(self.desk.table.doubted())
        for key in self.desk.table.wanted():
            if key in self.store:
                self._arrives(key)
                continue
            self.desk.table.missed(key)
            if key in doubted:
                self.desk.table.not_found(key)

    @rule(key=st.sampled_from("abcde"))
    def a_fetch_comes_back_whatever_happened_meanwhile(self, key: str) -> None:
        self._arrives(key)

    def _arrives(self, key: str) -> None:
        pin = FakePin()
        self.pins.append(pin)
        self.desk.table.arrived(key, pin, self.now)

    @rule(key=st.sampled_from("abcde"), cause=st.sampled_from(["unavailable", "no_room"]))
    def a_fetch_fails(self, key: str, cause: str) -> None:
        self.desk.table.hampered(key, cause, self.now + 0.5)

    # --- encoders ---

    @rule(key=st.sampled_from("abcde"))
    def an_event_comes(self, key: str) -> None:
        self.desk.table.announced(key)
        if self.desk.table.accepts(key) and key in self.store:
            self._arrives(key)

    @rule(key=st.sampled_from("abcde"), cause=st.sampled_from(["encoder", "corrupt", "not_encoded", "not_pooled"]))
    def it_will_not_come(self, key: str, cause: str) -> None:
        self.desk.table.failed(key, cause, self.now)

    @rule(keys=st.sets(st.sampled_from("abcde")))
    def an_encoder_renews(self, keys: set[str]) -> None:
        self.desk.table.renew(sorted(keys), self.now)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.desk.table.expire(self.now)

    @rule(short=st.booleans())
    def an_encoder_has_no_room_or_has_some_again(self, short: bool) -> None:
        if short:
            self.desk.make_room(self.now)
        else:
            self.desk.room_again()

    # --- what always holds ---

    @invariant()
    def what_vllm_may_read_is_pinned(self) -> None:
        assert all(self.desk.table.pinned(key) is not None for _, key in self.may_be_read)

    @invariant()
    def one_request_runs_without_all_it_needs(self) -> None:
        assert self.desk.partial in ("", *self.live)

    @invariant()
    def the_cap_holds(self) -> None:
        assert len(self.recomputing) <= LIMIT
        assert self.desk.slots.taken <= LIMIT

    @invariant()
    def nothing_is_released_twice_and_nothing_needed_is_released(self) -> None:
        assert all(pin.releases <= 1 for pin in self.pins)
        for key in "abcde":
            pin = self.desk.table.pinned(key)
            assert pin is None or pin.releases == 0
            needed = any(key in NEEDS[request] for request in self.live)
            assert needed or pin is None, "promised although no request holds it"

    @invariant()
    def pins_are_bounded(self) -> None:
        assert sum(pin.releases == 0 for pin in self.pins) <= 5 + MOST

    def teardown(self) -> None:
        """With silent encoders and an empty store every request is let run or is failed, a few at a time."""
        self.store.clear()
        waiting = set(self.live)
        for _ in range(60):
            self.now += LAST_LOOK
            self.desk.table.expire(self.now)
            self.the_listener_looks()
            for request in sorted(waiting):
                self.vllm_asks(request)
                if request in self.running or request in self.failed:
                    waiting.discard(request)
                    self._finish(request)
            self.the_cap_holds()
            if not waiting:
                break
        assert not waiting, f"{waiting} never settled"
        assert (self.desk.slots.taken, self.desk.slots.standing) == (0, 0)
        assert self.desk.take_failed() == set()
        self.now += HOLD
        self.desk.table.expire(self.now)
        assert all(pin.releases == 1 for pin in self.pins), "a pin leaked"
        assert not self.desk.waiting()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestAThousandInterleavings(Interleavings.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=25, deadline=None)


def lose(d: FeatureDesk[FakePin], *keys: str, cause: str = "encoder") -> None:
    for key in keys:
        d.table.failed(key, cause, 0.0)
        d.table.not_found(key)


def miss(d: FeatureDesk[FakePin], *keys: str) -> None:
    for key in keys:
        d.table.missed(key)


def ask(
    d: FeatureDesk[FakePin], request: str, keys: str, *, fails: bool = False, worth: int | None = None
) -> Admission:
    return d.admission(request, list(keys), 0.0, must_not_recompute=fails, worth=worth)


def test_a_request_with_several_lost_features_takes_one_slot() -> None:
    d = desk(limit=1)
    assert ask(d, "r", "ab") is Admission.WAIT
    lose(d, "a", "b")
    assert ask(d, "r", "ab") is Admission.RUN
    assert d.slots.taken == 1
    assert d.counters == {"recomputed.encoder": 2}
    ask(d, "r", "ab")
    assert d.counters == {"recomputed.encoder": 2}


def test_a_feature_that_comes_while_its_request_stands_in_line_is_used() -> None:
    d, pin = desk(limit=1), FakePin()
    for request, key in (("r", "a"), ("s", "b")):
        ask(d, request, key)
        lose(d, key)
    assert (ask(d, "r", "a"), ask(d, "s", "b")) == (Admission.RUN, Admission.WAIT)
    assert d.table.wanted() == ["b"]
    d.table.arrived("b", pin, 0.0)
    assert ask(d, "s", "b") is Admission.RUN
    assert (d.slots.taken, d.slots.standing, d.table.pinned("b")) == (1, 0, pin)


def test_an_aborted_request_gives_its_slot_to_the_next() -> None:
    d = desk(limit=1)
    for request, key in (("r", "a"), ("s", "b")):
        ask(d, request, key)
        lose(d, key)
        ask(d, request, key)
    d.release(["r"])
    assert ask(d, "s", "b") is Admission.RUN


def test_a_prefill_that_is_over_gives_its_slot_to_the_next() -> None:
    d = desk(limit=1)
    for request, key in (("r", "a"), ("s", "b")):
        ask(d, request, key)
        lose(d, key)
        ask(d, request, key)
    d.passed("r")
    assert ask(d, "s", "b") is Admission.RUN
    assert d.table.wanted() == []  # nobody looks for what has been recomputed
    assert ask(d, "r", "a") is Admission.WAIT  # preempted: in line again,
    assert d.table.wanted() == ["a"]  # and what comes now is used


def test_a_request_that_a_prefix_cache_takes_out_of_the_line_gets_no_slot() -> None:
    d = desk(limit=1)
    for request, key in (("r", "a"), ("s", "b"), ("t", "c")):
        ask(d, request, key)
        lose(d, key)
        ask(d, request, key)
    assert (d.slots.taken, d.slots.standing) == (1, 2)
    d.passed("s")
    assert d.slots.standing == 1
    d.passed("r")
    assert ask(d, "t", "c") is Admission.RUN, "the slot went to a request that needs none"
    assert d.table.wanted() == []


def test_nobody_looks_for_a_feature_whose_only_request_a_prefix_cache_has_served() -> None:
    d, pin = desk(), FakePin()
    ask(d, "r", "ab")
    d.table.arrived("a", pin, 0.0)
    d.passed("r")
    assert not d.waiting()
    assert d.table.pinned("a") is pin, "it may have been loaded"
    assert ask(d, "r", "ab") is Admission.WAIT  # preempted
    assert d.table.wanted() == ["b"]


def test_a_request_that_must_not_recompute_fails_once() -> None:
    d = desk()
    assert ask(d, "r", "ab", fails=True) is Admission.WAIT
    lose(d, "a", cause="deadline")
    assert ask(d, "r", "ab", fails=True) is Admission.FAIL
    assert d.failure("r", "ab").keys == ["a"]
    assert ask(d, "r", "ab", fails=True) is Admission.WAIT
    assert (d.take_failed(), d.take_failed()) == ({"r"}, set())
    assert ask(d, "r", "ab", fails=True) is Admission.WAIT  # the step after, under async scheduling
    assert d.take_failed() == set()
    assert d.counters == {"failed.deadline": 1}


def test_a_request_that_is_aborted_before_it_is_failed_is_not_named() -> None:
    d = desk()
    ask(d, "r", "a", fails=True)
    lose(d, "a")
    assert ask(d, "r", "a", fails=True) is Admission.FAIL
    d.ended("r")
    assert d.take_failed() == set()


def test_a_request_begins_with_what_is_there_of_its_beginning() -> None:
    d = desk()
    assert ask(d, "r", "abc", worth=1) is Admission.WAIT
    d.table.arrived("b", FakePin(), 0.0)
    assert ask(d, "r", "abc", worth=1) is Admission.WAIT, "b comes after a"
    d.table.arrived("a", FakePin(), 0.0)
    assert ask(d, "r", "abc", worth=1) is Admission.WAIT, "nobody has looked yet whether c is here"
    miss(d, "c")
    assert ask(d, "r", "abc") is Admission.WAIT, "nobody said that it is worth it"
    assert ask(d, "r", "abc", worth=1) is Admission.PARTIAL
    assert (d.leading("r", "abc", 0.0), d.counters["partial_prefills"]) == (2, 1)
    assert ask(d, "r", "c", worth=1) is Admission.WAIT, "it has come to what is awaited"
    d.table.arrived("c", FakePin(), 0.0)
    assert (ask(d, "r", "c", worth=1), d.partial) == (Admission.RUN, "")


def test_one_request_at_a_time_begins_before_its_features_are_here() -> None:
    d = desk()
    for request, key in (("r", "a"), ("s", "b")):
        ask(d, request, key)
        miss(d, key)
    assert (ask(d, "r", "a", worth=0), ask(d, "s", "b", worth=0)) == (Admission.PARTIAL, Admission.WAIT)
    d.release(["r"])  # aborted
    assert ask(d, "s", "b", worth=0) is Admission.PARTIAL


def test_a_request_that_has_begun_and_must_not_recompute_fails_as_any_other() -> None:
    d = desk()
    ask(d, "r", "ab", fails=True)
    d.table.arrived("a", FakePin(), 0.0)
    miss(d, "b")
    assert ask(d, "r", "ab", fails=True, worth=1) is Admission.PARTIAL
    lose(d, "b")
    assert ask(d, "r", "b", fails=True, worth=None) is Admission.FAIL
    assert (d.take_failed(), d.failure("r", "b").keys) == ({"r"}, ["b"])
    d.release(["r"])
    assert d.partial == ""


def test_a_request_that_has_begun_recomputes_what_is_lost_when_its_turn_has_come() -> None:
    d = desk(limit=1)
    ask(d, "first", "x")
    lose(d, "x")
    assert ask(d, "first", "x") is Admission.RUN
    ask(d, "r", "a")
    miss(d, "a")
    assert ask(d, "r", "a", worth=0) is Admission.PARTIAL
    lose(d, "a")
    assert ask(d, "r", "a", worth=0) is Admission.PARTIAL, "the text before it can be computed all the same"
    assert (d.slots.taken, d.slots.standing) == (1, 1)
    d.passed("first")
    assert (ask(d, "r", "a", worth=0), d.partial) == (Admission.RUN, "")


def short_of_room(d: FeatureDesk[FakePin]) -> None:
    for tenths in range(7):
        d.make_room(tenths / 10)


def test_who_waits_lets_go_of_its_pins_when_an_encoder_has_had_no_room_for_long_but_for_the_first() -> None:
    d, pins = desk(), {key: FakePin() for key in "abcd"}
    for request, keys in (("r", "ax"), ("s", "by"), ("t", "c")):
        ask(d, request, keys)
    for key in "abcd":
        d.table.arrived(key, pins[key], 0.0)  # nobody needs d: a prefetch
    assert ask(d, "t", "c") is Admission.RUN
    d.make_room(0.0)
    assert not any(pin.releases for pin in pins.values()), "it may be over at once"
    short_of_room(d)
    assert {key: pin.releases for key, pin in pins.items()} == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert d.table.wanted() == ["x"], "what is let go of may go before it is looked for again"
    ask(d, "u", "z")
    d.make_room(0.7)
    assert d.table.wanted() == ["x", "z"], "who needs nothing else holds no room while it waits"
    d.room_again()
    assert sorted(d.table.wanted()) == ["b", "x", "y", "z"]
    assert ask(d, "s", "by") is Admission.WAIT
    short_of_room(d)
    d.table.expire(PARK_S + 0.6)
    assert sorted(d.table.wanted()) == ["b", "x", "y", "z"], "the encoder has died, or its reports are lost"


def test_the_request_that_has_begun_keeps_its_pins() -> None:
    d, early, late = desk(), FakePin(), FakePin()
    ask(d, "r", "ax")
    ask(d, "s", "by", worth=1)
    d.table.arrived("a", early, 0.0)
    d.table.arrived("b", late, 0.0)
    miss(d, "y")
    assert ask(d, "s", "by", worth=1) is Admission.PARTIAL
    short_of_room(d)
    assert (early.releases, late.releases) == (1, 0)


def test_what_is_looked_for_the_last_time_is_not_put_off_by_a_lack_of_room() -> None:
    d = desk()
    ask(d, "r", "x")
    ask(d, "s", "bc")
    d.table.failed("b", "encoder", 0.0)
    short_of_room(d)
    assert set(d.table.wanted()) == {"x", "b"}
