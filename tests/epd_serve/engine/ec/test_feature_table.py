"""What a consumer knows of one feature: the transition table of `feature_table.py`, row by row."""

from __future__ import annotations

import pytest

from epd_serve.engine.ec.feature_item import FeatureState
from epd_serve.engine.ec.feature_table import FeatureTable

WAIT, HOLD, LAST_LOOK, RENEW_LIMIT = 3.0, 5.0, 1.0, 10.0


class FakePin:
    nbytes = 1

    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


def table(*, hold_s: float = HOLD, max_prefetched_bytes: int = 100) -> FeatureTable[FakePin]:
    return FeatureTable(
        wait_s=WAIT,
        hold_s=hold_s,
        max_prefetched_bytes=max_prefetched_bytes,
        last_look_s=LAST_LOOK,
        renew_limit_s=RENEW_LIMIT,
    )


def lost(t: FeatureTable[FakePin], key: str, request: str = "r", cause: str = "encoder", now: float = 0.0) -> None:
    t.need(request, key, now)
    t.failed(key, cause, now)
    t.not_found(key)
    assert t.need(request, key, now) is FeatureState.LOST


def test_a_wanted_feature_is_looked_up_once_more_at_its_deadline_before_it_is_lost() -> None:
    t = table()
    assert t.need("r", "a", 0.0) is FeatureState.WANTED
    assert (t.wanted(), t.doubted()) == (["a"], [])
    assert t.need("r", "a", WAIT) is FeatureState.DOUBTED
    assert (t.wanted(), t.doubted()) == (["a"], ["a"])
    t.not_found("a")
    assert t.need("r", "a", WAIT) is FeatureState.LOST
    assert (t.lost_by_cause, t.cause("a")) == ({"deadline": 1}, "deadline")


def test_what_the_last_look_finds_is_used() -> None:
    t, pin = table(), FakePin()
    t.need("r", "a", 0.0)
    t.failed("a", "encoder", 0.0)
    t.arrived("a", pin, 0.0)
    assert t.need("r", "a", 0.0) is FeatureState.READY
    t.not_found("a")  # too late to matter
    assert (t.pinned("a"), t.lost_by_cause) == (pin, {})


def test_a_last_look_that_is_not_answered_ends_too() -> None:
    t = table()
    t.need("r", "a", 0.0)
    t.failed("a", "corrupt", 0.0)
    assert t.need("r", "a", LAST_LOOK - 0.1) is FeatureState.DOUBTED
    assert t.need("r", "a", LAST_LOOK) is FeatureState.LOST
    assert t.lost_by_cause == {"corrupt": 1}


def test_a_lost_feature_that_comes_late_is_used_by_those_who_have_not_decided() -> None:
    t, pin = table(), FakePin()
    lost(t, "a")
    assert t.wanted() == ["a"]
    t.arrived("a", pin, 0.0)
    assert t.need("r", "a", 0.0) is FeatureState.READY


def test_a_decided_request_is_not_held_up_and_lets_a_late_feature_go() -> None:
    t, pin = table(), FakePin()
    lost(t, "a")
    t.decide("r", ["a"])
    assert (t.wanted(), t.accepts("a")) == ([], False)
    t.renew(["a"], 0.0)
    t.arrived("a", pin, 0.0)
    assert (t.need("r", "a", 0.0), t.pinned("a"), pin.releases) == (FeatureState.LOST, None, 1)


def test_a_new_request_has_a_lost_feature_looked_up_again_while_the_decided_one_runs_on() -> None:
    t = table()
    lost(t, "a")
    t.decide("r", ["a"])
    assert t.need("s", "a", 0.0) is FeatureState.DOUBTED
    assert t.need("r", "a", 0.0) is FeatureState.LOST
    t.arrived("a", FakePin(), 0.0)
    assert t.need("s", "a", 0.0) is FeatureState.READY
    assert t.need("r", "a", 0.0) is FeatureState.READY  # pinned for both: it may load what it has not encoded yet


def test_an_undecided_request_has_it_looked_for_again() -> None:
    t = table()
    lost(t, "a")
    t.decide("r", ["a"])
    t.undecide("r")
    assert t.wanted() == ["a"]


def test_renewals_move_the_deadline_but_not_for_ever() -> None:
    t = table()
    t.need("r", "a", 0.0)
    for now in (2.0, 4.0, 6.0, 8.0, 9.0):
        t.renew(["a", "nobody wants this"], now)
        assert t.need("r", "a", now) is FeatureState.WANTED
    assert t.need("r", "a", RENEW_LIMIT) is FeatureState.DOUBTED
    t.renew(["a"], RENEW_LIMIT)
    assert t.need("r", "a", RENEW_LIMIT) is FeatureState.DOUBTED


@pytest.mark.parametrize("doubted_only", [True, False])
def test_a_renewal_revives_what_was_given_up(doubted_only: bool) -> None:
    t = table()
    t.need("r", "a", 0.0)
    t.failed("a", "encoder", 0.0)
    if not doubted_only:
        t.not_found("a")
    t.renew(["a"], 1.0)
    assert t.need("r", "a", 1.0) is FeatureState.WANTED
    assert t.cause("a") == "deadline"


def test_a_renewal_forgets_a_failure_that_nobody_asked_about_yet() -> None:
    t = table()
    t.failed("a", "encoder", 0.0)
    t.renew(["a"], 0.0)
    assert t.need("r", "a", 0.0) is FeatureState.WANTED


def test_what_stands_in_the_way_names_the_cause_and_may_bring_the_deadline_forward() -> None:
    t = table()
    t.need("r", "a", 0.0)
    t.hampered("a", "unavailable", 0.5)
    t.hampered("a", "no_room", float("inf"))
    assert t.need("r", "a", 0.5) is FeatureState.DOUBTED
    assert t.cause("a") == "no_room"


def test_a_failure_before_the_request_is_remembered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_serve.engine.ec.feature_table._MAX_FAILED", 2)
    t = table()
    for key in "abc":
        t.failed(key, "encoder", 0.0)
    assert t.need("r", "c", 0.0) is FeatureState.DOUBTED
    assert t.need("r", "a", 0.0) is FeatureState.WANTED  # bounded: the oldest was forgotten
    t.release(["r"])
    assert t.need("r", "c", 0.0) is FeatureState.WANTED


def test_a_feature_that_came_after_its_failure_counts() -> None:
    t = table()
    t.failed("a", "encoder", 0.0)
    assert not t.announced("a")
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
