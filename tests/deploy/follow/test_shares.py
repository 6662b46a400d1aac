"""Cores of a device go where the work is: enough to matter, not for ever to and fro, and never all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.follow.follower import moved, step
from deploy.follow.shares import FINE, Held, divided, propose_shares, shares_of, text_of
from deploy.follow.types import Limits, Memory, Observation, Shares
from epd_serve.core_shares import DECODE_SHARE, LEAST_SHARE, parse_core_shares
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from npu_ops.core_sets import apportion

LIMITS = Limits(devices=2)
E, P, D = Role.E, Role.P, Role.D


def held(*stages: tuple[str, Role, int, float], cores: int = 0) -> list[Held]:
    """Stages by group, role, device and share."""
    return [Held(group, role, device, share, round(share * cores)) for group, role, device, share in stages]


def test_all_copies_of_a_group_have_to_divide_their_devices_alike() -> None:
    first, other = ("(E-P)", E, 0, 0.25), ("(E-P)", P, 0, 0.75)
    found = shares_of(held(first, other, ("(E-P)", E, 1, 0.25), ("(E-P)", P, 1, 0.75), cores=8))
    assert found == {"(E-P)": Shares({E: 0.25, P: 0.75}, {E: 1, P: 1}, 8)}
    assert shares_of(held(first, other, ("(E-P)", E, 1, 0.5), ("(E-P)", P, 1, 0.5))) == {}
    assert shares_of(held(first, other, ("(E-D)", E, 1, 0.25), ("(E-D)", D, 1, 0.75))) == {}, "E would mean both"


def test_whole_cores_count_and_cores_that_are_left_idle_stay_idle() -> None:
    (found,) = shares_of([Held("(E-P)", E, 0, 0.3, 1), Held("(E-P)", P, 0, 0.7, 1)]).values()
    assert found == Shares({E: 0.5, P: 0.5}, {E: 1, P: 1}, 2)
    (found,) = shares_of(held(("(E-P)", E, 0, 0.25), ("(E-P)", P, 0, 0.25), cores=8)).values()
    assert found.cores == 8 and sum(divided(found, {E: 5.0, P: 1.0}).values()) == 4
    assert shares_of(held(("(E-P)", E, 0, 0.3), ("(E-P)", P, 0, 0.7)))["(E-P)"].cores == FINE


@given(
    cores=st.integers(2, 64),
    had=st.integers(1, 63),
    work=st.tuples(st.floats(0, 9), st.floats(0, 9)),
    other=st.sampled_from([P, D]),
)
def test_no_other_division_is_better_for_the_busiest(
    cores: int, had: int, work: tuple[float, float], other: Role
) -> None:
    had = min(had, cores - 1)
    now = Shares({E: had / cores, other: 1 - had / cores}, {E: 1, other: 1}, cores)
    does = dict(zip(now.of, work, strict=True))
    to = divided(now, does)
    assert sum(to.values()) == cores and min(to.values()) >= 1
    if other is D:
        assert to[D] >= min(cores - had, round(DECODE_SHARE * cores), cores - 1)
    busiest = max(does[role] / to[role] for role in to)
    for role in to:  # a core more for the one is a core less for the other
        (rest,) = set(to) - {role}
        if to[rest] > max(1, round((DECODE_SHARE if rest is D else LEAST_SHARE) * cores)):
            assert max(does[role] / (to[role] + 1), does[rest] / (to[rest] - 1)) >= busiest - 1e-9


@given(cores=st.integers(2, 64), data=st.data())
def test_what_is_asked_for_comes_out_as_those_whole_cores(cores: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, cores - 1))
    shares = parse_core_shares(
        text_of({"(E-P)": Shares({E: first / cores, P: 1 - first / cores}, {E: 1, P: 1}, cores)})
    )
    assert shares is not None and apportion(cores, list(shares.values())) == [first, cores - first]


def seen(at_s: float, shares: Mapping[str, Shares], media: float, **more: object) -> Observation:
    """An encoder that takes 0.4 s of the whole device for a picture, and a P that takes 0.2."""
    of = shares["(E-P)"].of
    costs = {"media": {"(E-P)/E": 0.4 / of[E], "(E-P)/P": 0.2 / of[P], "D": 0.01}}
    return Observation(at_s, parse("(E-P)-D"), 10.0, {"media": 10 * media}, costs, shares=shares, **more)  # type: ignore[arg-type]


def halves(first: float = 0.25) -> dict[str, Shares]:
    return {"(E-P)": Shares({E: first, P: 1 - first}, {E: 1, P: 1}, 8)}


def test_shares_are_moved_before_anything_is_started_and_once_in_a_while() -> None:
    memory, decision = step(seen(5.0, halves(), 0.9), Memory(), Limits(devices=3))
    assert decision.chosen is not None and decision.chosen.what == "share" and decision.chosen.relieves == "(E-P)/E"
    assert decision.chosen.core_share == "E=0.625,P=0.375" and decision.chosen.layout == decision.layout
    memory = moved(decision, memory, LIMITS)
    _, again = step(seen(10.0, halves(), 0.9), memory, LIMITS)
    assert ("share", "core shares were changed a moment ago") in [(move.what, why) for move, why in again.refused]
    _, later = step(seen(40.0, halves(), 0.9), memory, LIMITS)
    assert later.chosen is not None and later.chosen.what == "share"


def test_who_is_not_late_or_would_gain_little_keeps_what_he_has() -> None:
    assert not [*propose_shares(seen(5.0, halves(), 0.3), {"(E-P)/E": 0.48, "(E-P)/P": 0.08}, LIMITS)]
    assert not [*propose_shares(seen(5.0, halves(0.625), 9.0), {"(E-P)/E": 5.8, "(E-P)/P": 4.8}, LIMITS)]


@pytest.mark.parametrize("why", ["it takes one limit"])
def test_where_they_are_fixed_that_is_the_reason(why: str) -> None:
    _, decision = step(seen(5.0, halves(), 0.9), Memory(), Limits(devices=2, fixed_shares=why))
    assert decision.chosen is None and why in [reason for _, reason in decision.refused]


def test_nothing_is_moved_during_a_change_not_even_the_followers_own() -> None:
    _, decision = step(seen(5.0, halves(), 0.9, changing=True, own=True), Memory(), LIMITS)
    assert ("share", "a change is under way") in [(move.what, why) for move, why in decision.refused]


@given(media=st.floats(0.05, 2.5), first=st.sampled_from([1, 2, 4, 6, 7]))
def test_a_steady_load_is_settled_at_once_and_what_it_needs_is_met_where_it_can_be(media: float, first: int) -> None:
    shares, memory, changes = halves(first / 8), Memory(), 0
    for tick in itertools.count(1):
        memory, decision = step(seen(5.0 * tick, shares, media), memory, LIMITS)
        if (move := decision.chosen) is not None and move.core_share:
            changes += 1
            memory = moved(decision, memory, LIMITS)
            named = parse_core_shares(move.core_share)
            assert named is not None
            shares = {"(E-P)": Shares({Role(name): share for name, share in named.items()}, {E: 1, P: 1}, 8)}
        if tick > 60:
            break
    assert changes <= 2
    best = min(max(0.4 * media / (cores / 8), 0.2 * media / (1 - cores / 8)) for cores in range(1, 8))
    busy = max(0.4 * media / shares["(E-P)"].of[E], 0.2 * media / shares["(E-P)"].of[P])
    assert busy <= max(LIMITS.use, 1.15 * best) + 1e-9
