"""What a consumer knows of features: pins never leak, decisions stay, nothing is released twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve.engine.ec.feature_table import FeatureState, FeatureTable

REQUESTS = st.sampled_from(["r0", "r1", "r2"])
KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
WAIT, HOLD, MOST = 3.0, 5.0, 2


class FakePin:
    nbytes = 1

    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class Table(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table: FeatureTable[FakePin] = FeatureTable(wait_s=WAIT, hold_s=HOLD, max_prefetched_bytes=MOST)
        self.now = 0.0
        self.pins: list[FakePin] = []
        self.needs: dict[str, set[str]] = {}  # key → requests
        self.seen: dict[tuple[str, str], FeatureState] = {}

    @rule(request=REQUESTS, key=KEYS)
    def need(self, request: str, key: str) -> None:
        state = self.table.need(request, key, self.now)
        before = self.seen.get((request, key))
        assert before in (None, FeatureState.WANTED, state), "a decision changed under a running request"
        self.seen[request, key] = state
        self.needs.setdefault(key, set()).add(request)
        assert (self.table.pinned(key) is not None) == (state is FeatureState.READY)

    @rule(key=KEYS)
    def arrived(self, key: str) -> None:
        if self.table.accepts(key):
            self._arrives(key)

    @rule(key=KEYS)
    def arrived_although_settled_meanwhile(self, key: str) -> None:
        self._arrives(key)

    def _arrives(self, key: str) -> None:
        pin = FakePin()
        self.pins.append(pin)
        self.table.arrived(key, pin, self.now)

    @rule(key=KEYS)
    def failed(self, key: str) -> None:
        self.table.failed(key, "test")

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        self.table.release([request, "unknown"])
        for requests in self.needs.values():
            requests.discard(request)
        self.seen = {pair: state for pair, state in self.seen.items() if pair[0] != request}

    @rule(seconds=st.sampled_from([0.5, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)

    @invariant()
    def nothing_is_released_twice_and_what_is_needed_is_pinned(self) -> None:
        assert all(pin.releases <= 1 for pin in self.pins)
        for key, requests in self.needs.items():
            pin = self.table.pinned(key)
            assert pin is None or pin.releases == 0
            if not requests:
                assert pin is None, "promised although no request holds it"

    @invariant()
    def prefetches_are_bounded(self) -> None:
        needed = sum(bool(requests) for requests in self.needs.values())
        assert sum(pin.releases == 0 for pin in self.pins) <= needed + MOST

    def teardown(self) -> None:
        self.table.release(["r0", "r1", "r2"])
        self.now += HOLD
        self.table.expire(self.now)
        assert all(pin.releases == 1 for pin in self.pins)
        assert not self.table.wanted()


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def table(*, hold_s: float = HOLD, max_prefetched_bytes: int = 100) -> FeatureTable[FakePin]:
    return FeatureTable(wait_s=WAIT, hold_s=hold_s, max_prefetched_bytes=max_prefetched_bytes)


def test_a_wanted_feature_is_given_up_at_its_deadline_and_stays_so_while_referenced() -> None:
    t = table()
    assert t.need("r", "a", 0.0) is FeatureState.WANTED
    assert t.wanted() == ["a"]
    assert t.need("r", "a", WAIT) is FeatureState.LOST
    pin = FakePin()
    t.arrived("a", pin, WAIT)
    assert (t.need("r", "a", WAIT), t.pinned("a"), pin.releases) == (FeatureState.LOST, None, 1)
    assert t.lost_by_cause == {"deadline": 1}
    t.release(["r"])
    assert t.need("s", "a", WAIT) is FeatureState.WANTED


def test_a_failure_before_the_request_is_remembered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_serve.engine.ec.feature_table._MAX_FAILED", 2)
    t = table()
    for key in "abc":
        t.failed(key, "encoder")
    assert t.need("r", "c", 0.0) is FeatureState.LOST
    assert t.need("r", "a", 0.0) is FeatureState.WANTED  # bounded: the oldest was forgotten
    t.release(["r"])
    assert t.need("r", "c", 0.0) is FeatureState.WANTED


def test_a_feature_that_came_after_its_failure_counts() -> None:
    t = table()
    t.failed("a", "encoder")
    t.arrived("a", FakePin(), 0.0)
    assert t.need("r", "a", 0.0) is FeatureState.READY


def test_a_prefetch_is_not_promised_and_is_let_go() -> None:
    t, pin = table(hold_s=HOLD), FakePin()
    t.arrived("a", pin, 0.0)
    assert t.pinned("a") is None
    t.expire(HOLD - 0.1)
    assert not pin.releases
    t.expire(HOLD)
    assert pin.releases == 1


def test_the_oldest_prefetches_make_room_for_new_ones() -> None:
    t, pins = table(max_prefetched_bytes=2), [FakePin(), FakePin(), FakePin()]
    for key, pin in zip("abc", pins, strict=True):
        t.arrived(key, pin, 0.0)
    assert [pin.releases for pin in pins] == [1, 0, 0]
    t.need("r", "b", 0.0)  # no longer a mere prefetch: does not count
    t.arrived("d", FakePin(), 0.0)
    assert [pin.releases for pin in pins] == [1, 0, 0]


def test_a_stage_that_does_not_prefetch_takes_what_it_wants_only() -> None:
    t, early, wanted = table(max_prefetched_bytes=0), FakePin(), FakePin()
    assert not t.accepts("a")
    t.arrived("a", early, 0.0)
    assert early.releases == 1
    t.need("r", "a", 0.0)
    assert t.accepts("a")
    t.arrived("a", wanted, 0.0)
    assert t.pinned("a") is wanted


def test_close_unpins_everything_once() -> None:
    t, pins = table(), [FakePin(), FakePin()]
    t.need("r", "a", 0.0)
    t.arrived("a", pins[0], 0.0)
    t.arrived("b", pins[1], 0.0)
    t.close()
    t.release(["r"])
    assert [pin.releases for pin in pins] == [1, 1]
