"""Recompute slots: bounded, in order of arrival, never lost."""

from __future__ import annotations

from epd_serve.engine.ec.feature_desk import RecomputeSlots


def test_at_most_the_limit_recompute_and_the_rest_follow_in_order_of_arrival() -> None:
    slots = RecomputeSlots(2)
    assert [slots.claim(request) for request in "abcd"] == [True, True, False, False]
    assert (
        slots.claim("a") and not slots.claim("d") and not slots.claim("c")
    )  # asked again: no second slot, no new place
    slots.give_back("a")
    assert slots.claim("c") and not slots.claim("d")
    assert (slots.taken, slots.standing) == (2, 1)


def test_who_leaves_the_line_is_not_waited_for() -> None:
    slots = RecomputeSlots(1)
    for request in "abc":
        slots.claim(request)
    slots.give_back("b")  # aborted in line
    assert slots.give_back("a")
    assert slots.claim("c")


def test_giving_back_what_one_does_not_hold_changes_nothing() -> None:
    slots = RecomputeSlots(1)
    slots.claim("a")
    assert not slots.give_back("nobody")
    assert (slots.taken, slots.standing) == (1, 0)
