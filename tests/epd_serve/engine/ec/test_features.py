"""What vLLM is told about requests: every request settles, slots are bounded and come back, pins never leak."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve.engine.ec.features import FETCH_S, LOOK_S, SEEN_S, Failure, Features

WAIT, LAST_LOOK, RENEW_LIMIT, LIMIT = 3.0, 1.0, 9.0, 2


class FakePin:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class Shelf:
    """An arena of keys: what lies there can be pinned, all that is asked for or none."""

    def __init__(self, keys: str = "") -> None:
        self.keys = set(keys)
        self.pins: list[FakePin] = []

    def pin(self, request: str, keys: Collection[str]) -> Any:
        if not self.keys.issuperset(keys):
            return None
        pins = [FakePin() for _ in keys]
        self.pins += pins
        return pins

    @property
    def held(self) -> int:
        assert all(pin.releases <= 1 for pin in self.pins), "released twice"
        return sum(not pin.releases for pin in self.pins)


def features(shelf: Shelf | None = None, limit: int = LIMIT) -> Features:
    pin = (shelf or Shelf("abcdefgh")).pin
    return Features(pin, recompute_limit=limit, wait_s=WAIT, last_look_s=LAST_LOOK, renew_limit_s=RENEW_LIMIT)


def ask(
    f: Features, request: str, keys: str, *, now: float = 0.0, fails: bool = False, worth: int | None = None
) -> Any:
    return f.may_run(request, list(keys), now, must_not_recompute=fails, worth=worth)


def looked_for(f: Features, now: float = 0.0) -> list[str]:
    return [key for key, _ in f.to_look_for(now)]


def last_look(f: Features, key: str) -> bool:
    """Whether it is lost where it is not found now."""
    return f._known(key).last_look


def holders(f: Features, limit: int = LIMIT) -> list[str]:
    """Requests that may recompute."""
    return list(f.slots)[:limit]


def lose(f: Features, *keys: str, cause: str = "encoder", now: float = 0.0) -> None:
    for key in keys:
        f.failed(key, cause, now)
        f.not_found(key)


# --- one feature --------------------------------------------------------------------------------------------------


def test_a_wanted_feature_is_looked_for_once_more_at_its_deadline_before_it_is_lost() -> None:
    f = features()
    assert ask(f, "r", "a") is None
    assert looked_for(f) == ["a"]
    assert looked_for(f) == [], "not all the time"
    assert looked_for(f, LOOK_S) == ["a"]
    f.not_found("a")  # not the last look
    assert ask(f, "r", "a", now=WAIT) is None
    assert [(key, row.last_look) for key, row in f.to_look_for(WAIT)] == [("a", True)]
    f.not_found("a")
    assert ask(f, "r", "a", now=WAIT) == 1, "it recomputes"
    assert dict(+f.counters) == {"lost.deadline": 1, "recomputed.deadline": 1}


def test_what_the_last_look_finds_is_used() -> None:
    shelf = Shelf("a")
    f = features(shelf)
    ask(f, "r", "a")
    f.failed("a", "encoder", 0.0)
    f.found("a", 0.0)
    f.not_found("a")  # too late to matter
    assert ask(f, "r", "a") == 1
    assert (shelf.held, dict(+f.counters)) == (1, {})


def test_a_last_look_that_is_not_answered_ends_too() -> None:
    f = features()
    ask(f, "r", "a")
    f.failed("a", "corrupt", 0.0)
    f.failed("a", "corrupt", LAST_LOOK / 2)  # said at every step: it moves nothing
    assert ask(f, "r", "a", now=LAST_LOOK - 0.1) is None
    assert ask(f, "r", "a", now=LAST_LOOK) == 1
    assert f.counters["recomputed.corrupt"] == 1


def test_what_was_evicted_before_it_could_be_pinned_is_looked_for_and_then_lost() -> None:
    shelf = Shelf("b")
    f = features(shelf)
    ask(f, "r", "ab")
    f.found("a", 0.0)
    f.found("b", 0.0)
    f.news = False
    assert ask(f, "r", "ab") is None
    assert (shelf.held, f.news) == (0, True), "all or none, and it is looked for at once"
    f.found("b", 0.0)
    f.not_found("a")
    assert ask(f, "r", "ab") == 2
    assert (shelf.held, f.counters["recomputed.evicted"]) == (1, 1)


def test_a_new_request_has_a_lost_feature_looked_for_again_while_another_one_recomputes_it() -> None:
    shelf = Shelf("a")
    f = features(shelf)
    ask(f, "r", "a")
    lose(f, "a")
    assert ask(f, "r", "a") == 1
    assert ask(f, "s", "a") is None
    assert ask(f, "r", "a") == 1, "whoever recomputes is never held up again"
    f.found("a", 0.0)
    assert (ask(f, "s", "a"), ask(f, "r", "a"), shelf.held) == (1, 1, 1)


def test_renewals_move_the_deadline_but_not_for_ever() -> None:
    f = features()
    ask(f, "r", "a")
    for now in (2.0, 4.0, 6.0, 8.0, 8.9):
        f.renew(["a", "nobody wants this"], now)
        assert ask(f, "r", "a", now=now) is None
        assert not last_look(f, "a")
    ask(f, "r", "a", now=RENEW_LIMIT)
    f.renew(["a"], RENEW_LIMIT)
    assert last_look(f, "a")


@pytest.mark.parametrize("last_look_only", [True, False])
def test_a_renewal_revives_what_was_given_up(last_look_only: bool) -> None:
    f = features()
    ask(f, "r", "a")
    f.failed("a", "encoder", 0.0)
    if not last_look_only:
        f.not_found("a")
    f.renew(["a"], 1.0)
    assert ask(f, "r", "a", now=1.0) is None
    assert not last_look(f, "a")


def test_what_stands_in_the_way_names_the_cause_and_may_bring_the_deadline_forward() -> None:
    f = features()
    ask(f, "r", "a")
    f.hampered("a", "unavailable", 0.5)
    f.not_fetched("a", "no_room", 0.0)
    ask(f, "r", "a", now=0.5)
    f.not_found("a")
    assert dict(+f.counters) == {"fetch_no_room": 1, "lost.no_room": 1}


def test_a_failure_before_the_request_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_serve.engine.ec.features._MAX_ROWS", 2)
    f = features()
    for key in "abc":
        f.failed(key, "encoder", 0.0)
    ask(f, "r", "c")
    assert last_look(f, "c")
    ask(f, "s", "a")
    assert not last_look(f, "a"), "bounded: the oldest was forgotten"


@pytest.mark.parametrize("word", ["renewed", "announced"])
def test_an_encoder_s_word_forgets_a_failure_before_it(word: str) -> None:
    f = features()
    f.failed("a", "encoder", 0.0)
    if word == "renewed":
        f.renew(["a"], 0.0)
    else:
        f.announced("a", 0.0, afar=False)
    ask(f, "r", "a")
    assert not last_look(f, "a")


def test_the_second_tier_is_asked_every_half_second_or_when_something_was_heard() -> None:
    f = features()
    ask(f, "r", "a")
    assert [f.fetch_due("a", now) for now in (0.0, FETCH_S / 2, FETCH_S)] == [True, False, True]
    f.announced("a", FETCH_S, afar=False)
    assert not f.fetch_due("a", FETCH_S)
    f.announced("a", FETCH_S, afar=True)
    assert f.fetch_due("a", FETCH_S)
    assert not f.fetch_due("unknown", 0.0)


def test_what_an_encoder_makes_is_expected_until_it_falls_silent_or_says_so() -> None:
    f = features()
    f.made(["a", "b"], 0.0)
    f.renew(["a", "c"], 2.0)
    assert [f.makes(key, 4.0) for key in "abc"] == [True, False, False]
    assert (f.announced("a", 4.0, afar=False), f.announced("a", 4.0, afar=False)) == (True, False)
    f.made(["b"], 4.0)
    assert (f.failed("b", "encoder", 4.0), f.failed("b", "encoder", 4.0)) == (True, False)
    assert not f.makes("a", 4.0) and not f.makes("b", 4.0)


def test_a_request_that_has_arrived_has_its_features_looked_for_and_nobody_else_s() -> None:
    f = features(Shelf("a"))
    f.announced("a", 0.0, afar=True)
    assert looked_for(f) == [], "no request of ours"
    f.arrived("ab", 0.0)
    assert looked_for(f) == ["a", "b"]
    assert looked_for(f, LOOK_S) == [], "once, and when it is announced"
    assert not f.waiting(), "it waits for something else"
    f.announced("b", LOOK_S, afar=True)
    assert looked_for(f, LOOK_S) == ["b"]
    f.found("b", LOOK_S)
    f.announced("b", 1.0, afar=True)
    assert looked_for(f, 1.0) == [], "it is here"
    assert dict(+f.counters) == {"prefetched": 1}


def test_a_request_that_has_arrived_has_fetched_what_was_said_to_be_there_lately() -> None:
    f = features()
    for key in "ab":
        f.announced(key, 0.0, afar=key == "a")
    f.arrived("abc", SEEN_S / 2)
    assert [f.fetch_due(key, SEEN_S / 2) for key in "abc"] == [True, False, False]
    assert not f.fetch_due("a", SEEN_S), "a prefix cache may have what an old image is needed for"
    ask(f, "r", "ab", now=SEEN_S)
    assert [f.fetch_due(key, SEEN_S) for key in "ab"] == [True, True]


def test_what_no_request_will_ask_for_any_more_is_not_fetched() -> None:
    f = features()
    f.arrived("a", 0.0)
    assert f.wants("a", ahead=True) and not f.wants("a")
    ask(f, "r", "a")
    f.release(["r"])
    assert not f.wants("a", ahead=True)
    f.announced("a", 1.0, afar=True)
    assert looked_for(f, 1.0) == []


def test_what_was_seen_counts_for_its_request_or_lately_and_what_another_one_has_pinned() -> None:
    shelf = Shelf("ab")
    f = features(shelf)
    f.found("a", 0.0)
    f.found("b", 0.0)
    assert ask(f, "r", "a", now=SEEN_S) == 1
    assert ask(f, "s", "a", now=SEEN_S) == 1, "it is pinned, so it is whole"
    f.release(["r", "s"])
    f.news = False
    assert (ask(f, "t", "a", now=SEEN_S), f.news) == (None, True), "its memory was anybody's meanwhile"
    assert ask(f, "t", "b", now=SEEN_S + 0.1) is None


# --- requests -----------------------------------------------------------------------------------------------------


def test_pins_go_with_the_last_request_and_are_promised_to_requests_only() -> None:
    shelf = Shelf("ab")
    f = features(shelf)
    f.found("a", 0.0)
    assert (f.pinned("a"), shelf.held) == (None, 0), "what is here is held by nobody"
    assert (ask(f, "r", "a"), ask(f, "s", "a"), shelf.held) == (1, 1, 2)
    f.release(["r", "unknown"])
    assert f.pinned("a") is not None
    f.release(["s"])
    assert (f.pinned("a"), shelf.held, f.waiting()) == (None, 0, False)
    ask(f, "t", "a")
    f.release("t")
    assert shelf.held == 0


def test_a_request_with_several_lost_features_takes_one_slot() -> None:
    f = features(limit=1)
    assert ask(f, "r", "ab") is None
    lose(f, "a", "b")
    assert (ask(f, "r", "ab"), ask(f, "r", "ab")) == (2, 2)
    assert holders(f) == ["r"]
    assert f.counters["recomputed.encoder"] == 2


def test_a_feature_that_comes_while_its_request_stands_in_line_is_used() -> None:
    shelf = Shelf("b")
    f = features(shelf, limit=1)
    for request, key in (("r", "a"), ("s", "b")):
        ask(f, request, key)
        lose(f, key)
    assert (ask(f, "r", "a"), ask(f, "s", "b")) == (1, None)
    assert looked_for(f, LOOK_S) == ["b"]
    f.found("b", 0.0)
    assert ask(f, "s", "b") == 1
    assert (list(f.slots), shelf.held) == (["r"], 1)


def test_slots_go_out_in_the_order_of_arrival() -> None:
    f = features(limit=1)
    for request, key in (("r", "a"), ("s", "b"), ("t", "c")):
        ask(f, request, key)
        lose(f, key)
        ask(f, request, key)
    assert list(f.slots) == ["r", "s", "t"]
    f.passed("s")  # a prefix cache has it all
    assert list(f.slots) == ["r", "t"]
    f.passed("r")
    assert ask(f, "t", "c") == 1, "the slot went to a request that needs none"


@pytest.mark.parametrize("end", ["aborted", "prefilled"])
def test_a_request_that_needs_its_slot_no_more_gives_it_to_the_next(end: str) -> None:
    f = features(limit=1)
    for request, key in (("r", "a"), ("s", "b")):
        ask(f, request, key)
        lose(f, key)
        ask(f, request, key)
    f.release(["r"]) if end == "aborted" else f.passed("r")
    assert ask(f, "s", "b") == 1
    if end == "prefilled":  # and preempted: it looks for what it has recomputed anew, which may have come
        assert ask(f, "r", "a") is None
        assert looked_for(f, LOOK_S) == ["a"]


def test_nobody_looks_for_a_feature_whose_only_request_a_prefix_cache_has_served() -> None:
    shelf = Shelf("a")
    f = features(shelf)
    f.found("a", 0.0)
    assert ask(f, "r", "ab") is None
    f.passed("r")
    assert (f.waiting(), looked_for(f, LOOK_S)) == (False, [])
    assert ask(f, "r", "ab") is None  # preempted
    assert looked_for(f, LOOK_S) == ["a", "b"]


def test_a_request_that_must_not_recompute_fails_once() -> None:
    f = features()
    assert ask(f, "r", "ab", fails=True) is None
    lose(f, "a", cause="deadline")
    assert ask(f, "r", "ab", fails=True) == Failure(["a"], "deadline")
    assert ask(f, "r", "ab", fails=True) is None
    assert (f.take_failed(), f.take_failed()) == ({"r"}, set())
    assert ask(f, "r", "ab", fails=True) is None  # the step after, under async scheduling
    assert f.counters["failed.deadline"] == 1


def test_a_request_that_is_aborted_before_it_is_failed_is_not_named() -> None:
    f = features()
    ask(f, "r", "a", fails=True)
    lose(f, "a")
    assert isinstance(ask(f, "r", "a", fails=True), Failure)
    f.ended("r")
    assert f.take_failed() == set()


def test_a_request_begins_with_what_is_there_of_its_beginning() -> None:
    shelf = Shelf("abc")
    f = features(shelf)
    f.found("b", 0.0)
    assert ask(f, "r", "abc", worth=1) is None, "b comes after a"
    f.found("a", 0.0)
    assert ask(f, "r", "abc", worth=1) is None, "nobody has looked yet whether c is here"
    assert f.missed("c") and not f.missed("c")
    assert ask(f, "r", "abc") is None, "nobody said that it is worth it"
    assert (ask(f, "r", "abc", worth=1), f.partial, shelf.held) == (2, "r", 2)
    assert f.counters["partial_prefills"] == 1
    assert ask(f, "r", "c", worth=1) is None, "it has come to what is awaited"
    f.found("c", 0.0)
    assert (ask(f, "r", "c", worth=1), f.partial, shelf.held) == (1, "", 3)


def test_one_request_at_a_time_begins_before_its_features_are_here() -> None:
    f = features()
    for request, key in (("r", "a"), ("s", "b")):
        ask(f, request, key)
        f.missed(key)
    assert (ask(f, "r", "a", worth=0), ask(f, "s", "b", worth=0)) == (0, None)
    f.release(["r"])  # aborted
    assert ask(f, "s", "b", worth=0) == 0


def test_a_request_that_has_begun_and_must_not_recompute_fails_as_any_other() -> None:
    f = features()
    f.found("a", 0.0)
    ask(f, "r", "ab", fails=True)
    f.missed("b")
    assert ask(f, "r", "ab", fails=True, worth=1) == 1
    lose(f, "b")
    assert ask(f, "r", "b", fails=True) == Failure(["b"], "encoder")
    f.release(["r"])
    assert f.partial == ""


def test_a_request_that_has_begun_recomputes_what_is_lost_when_its_turn_has_come() -> None:
    f = features(limit=1)
    ask(f, "first", "x")
    lose(f, "x")
    assert ask(f, "first", "x") == 1
    ask(f, "r", "a")
    f.missed("a")
    assert ask(f, "r", "a", worth=0) == 0
    lose(f, "a")
    assert ask(f, "r", "a", worth=0) == 0, "the text before it can be computed all the same"
    assert list(f.slots) == ["first", "r"]
    f.passed("first")
    assert (ask(f, "r", "a", worth=0), f.partial) == (1, "")


def test_what_the_request_that_has_begun_or_waits_longest_needs_is_protected() -> None:
    f = features(Shelf("abcd"))
    for key in "abcd":
        f.found(key, 0.0)
    for request, keys in (("r", "ax"), ("s", "by")):
        ask(f, request, keys)
    assert f.protected() == ["a"]
    f.missed("y")
    assert ask(f, "s", "by", worth=1) == 1
    assert f.protected() == [], "what it has begun with is pinned"
    f.release(["s", "r"])
    assert ask(f, "t", "cz") is None
    assert f.protected() == ["c"]


# --- any order of events ------------------------------------------------------------------------------------------

REQUESTS = [f"r{number}" for number in range(6)]
FAILING = {"r4", "r5"}
NEEDS = {"r0": "a", "r1": "ab", "r2": "bc", "r3": "cde", "r4": "ad", "r5": "e"}
keys = st.sampled_from("abcde")


class Interleavings(RuleBasedStateMachine):
    """A scheduler, a store and encoders that do their worst. Events are dropped by not being drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf()
        self.features = features(self.shelf)
        self.now = 0.0
        self.live: set[str] = set()
        self.running: set[str] = set()
        self.failed: list[str] = []
        self.arrived: set[str] = set()
        self.may_be_read: set[tuple[str, str]] = set()

    # --- vLLM ---

    @rule(request=st.sampled_from(REQUESTS), worth=st.sampled_from([None, 0, 1, 2]))
    def vllm_asks(self, request: str, worth: int | None = None) -> None:
        if request in self.failed:
            return
        self.live.add(request)
        before = self.shelf.held
        answer = ask(self.features, request, NEEDS[request], now=self.now, fails=request in FAILING, worth=worth)
        recomputes = self.features._recomputes.get(request, set())
        if isinstance(answer, Failure):
            assert request in FAILING and answer.keys and answer.cause
            self.failed.append(request)
        elif answer is None:
            assert self.shelf.held == before, "who waits gets no room"
        else:
            ahead = [key for key in NEEDS[request][:answer] if key not in recomputes]
            self.may_be_read |= {(request, key) for key in ahead}
            if answer < len(NEEDS[request]):
                assert worth is not None and worth <= answer and self.features.partial == request
            else:
                assert not (recomputes and request in FAILING), "asked to recompute what it must not"
                self.running.add(request)

    @rule(request=st.sampled_from(REQUESTS))
    def a_request_arrives(self, request: str) -> None:
        self.features.arrived(NEEDS[request], self.now)
        self.arrived |= set(NEEDS[request])

    @rule()
    def vllm_takes_the_failed(self) -> None:
        taken = self.features.take_failed()
        assert taken <= set(self.failed), "named twice, or never failed"
        for request in taken:
            self._finish(request)

    @rule(request=st.sampled_from(REQUESTS))
    def a_request_finishes_or_is_aborted(self, request: str) -> None:
        self._finish(request)

    def _finish(self, request: str) -> None:
        self.features.ended(request)
        self.features.release([request, "unknown"])
        self.live.discard(request)
        self.running.discard(request)
        self.may_be_read = {(reader, key) for reader, key in self.may_be_read if reader != request}
        if request in self.failed:
            self.failed.remove(request)

    @rule(request=st.sampled_from(REQUESTS))
    def a_prefill_passes_its_items(self, request: str) -> None:
        """Or a prefix cache that has them all spares it the wait."""
        if request in self.live and request not in self.failed:
            self.features.passed(request)
            self.running.add(request)

    # --- the store and its listener ---

    @rule(key=keys, there=st.booleans())
    def the_store_changes(self, key: str, there: bool) -> None:
        (self.shelf.keys.add if there else self.shelf.keys.discard)(key)

    @rule()
    def the_listener_looks(self) -> None:
        asked = {key for request in self.live for key in NEEDS[request]}
        for key, row in list(self.features.to_look_for(self.now)):
            assert key in asked | self.arrived, "nobody asked for it"
            if key in self.shelf.keys:
                self.features.found(key, self.now)
                continue
            self.features.missed(key)
            if row.last_look:
                self.features.not_found(key)

    @rule(key=keys)
    def a_fetch_comes_back_whatever_happened_meanwhile(self, key: str) -> None:
        self.features.found(key, self.now)

    @rule(key=keys, why=st.sampled_from(["missing", "unavailable", "no_room", "corrupt"]))
    def a_fetch_fails(self, key: str, why: str) -> None:
        self.features.not_fetched(key, why, self.now)

    # --- encoders ---

    @rule(key=keys, afar=st.booleans())
    def an_event_comes(self, key: str, afar: bool) -> None:
        self.features.announced(key, self.now, afar=afar)

    @rule(key=keys, cause=st.sampled_from(["encoder", "corrupt", "not_encoded", "not_pooled"]))
    def it_will_not_come(self, key: str, cause: str) -> None:
        self.features.failed(key, cause, self.now)

    @rule(held=st.sets(keys), new=st.booleans())
    def an_encoder_begins_or_renews(self, held: set[str], new: bool) -> None:
        (self.features.made if new else self.features.renew)(sorted(held), self.now)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # --- what always holds ---

    @invariant()
    def what_vllm_may_read_is_pinned(self) -> None:
        assert all(self.features.pinned(key) is not None for _, key in self.may_be_read)

    @invariant()
    def one_request_runs_without_all_it_needs(self) -> None:
        assert self.features.partial in ("", *self.live)

    @invariant()
    def the_cap_holds(self) -> None:
        assert set(self.features._recomputes) <= set(holders(self.features))

    @invariant()
    def pins_belong_to_requests(self) -> None:
        assert self.shelf.held == sum(len(held) for held in self.features._held.values())
        assert set(self.features._held) <= self.live

    def teardown(self) -> None:
        """With silent encoders and an empty store every request is let run or is failed, a few at a time."""
        self.shelf.keys.clear()
        waiting = set(self.live)
        for _ in range(60):
            self.now += LAST_LOOK
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
        assert not self.features.slots
        assert self.features.take_failed() == set()
        assert self.shelf.held == 0, "a pin leaked"
        assert not self.features.waiting()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestAThousandInterleavings(Interleavings.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=25, deadline=None)
