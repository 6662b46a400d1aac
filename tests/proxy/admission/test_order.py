"""Whose turn it is: least slack first, lost causes last and yet not for ever, and what a line does with that."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.admission.order import ORDERS, PATIENCE, Line, Order, Stand, deadline, fcfs, sjf


@dataclass(frozen=True)
class Asked:
    arrived: float = 0.0
    slo_s: float = 2.0
    service_s: float = 0.0
    before_s: float = 0.0
    sooner_s: float = 0.0


@dataclass(eq=False)
class One:
    stand: Stand
    name: str = field(default="", compare=False)


def line_of(order: Order, *asked: Asked) -> tuple[Line[One], list[One]]:
    line, ones = Line[One](), [One(order(one, number), str(number)) for number, one in enumerate(asked)]
    for one in ones:
        line.add(one)
    return line, ones


def names(line: Line[One], now: float) -> str:
    return "".join(one.name for _, one in line.in_order(now))


def test_who_has_to_begin_soonest_is_first_whenever_it_came() -> None:
    patient, old, urgent, large = (
        Asked(arrived=0.0, slo_s=30.0),
        Asked(arrived=0.0, slo_s=9.0),
        Asked(arrived=5.0, slo_s=2.0),
        Asked(arrived=0.0, slo_s=20.0, service_s=14.0),
    )
    line, _ = line_of(deadline, patient, old, urgent, large)
    assert names(line, 5.0) == "3210"


def test_it_ages_by_itself() -> None:
    """Of two that want the same, nobody overtakes who came before it."""
    line, _ = line_of(deadline, *(Asked(arrived=float(at)) for at in range(4)))
    assert names(line, 0.0) == names(line, 1.9) == names(line, 100.0) == "0123"


def test_lost_causes_go_after_everybody_who_can_make_it_but_not_for_ever() -> None:
    lost, lost_too = Asked(slo_s=1.0, before_s=100.0), Asked(slo_s=1.0, before_s=50.0)
    line, _ = line_of(deadline, lost, lost_too, Asked(arrived=60.0, slo_s=1000.0))
    assert names(line, 0.5) == "012", "least slack first while all can make it"
    assert names(line, 61.0) == "210"
    assert names(line, 71.0) == "120", "the second has waited 1.4 times as long as it would have in order of arrival"
    assert names(line, 141.0) == "102", "and so has the first"


def test_a_unit_of_priority_is_worth_its_seconds_in_every_order() -> None:
    for order in (fcfs, sjf, deadline):
        one = Asked(arrived=10.0, service_s=1.0, before_s=3.0)
        usual, sooner, later = (order(replace(one, sooner_s=seconds), 0) for seconds in (0.0, 4.0, -4.0))
        assert (sooner.rank, later.rank) == (usual.rank - 4.0, usual.rank + 4.0)
    assert (sooner.turn, later.turn) == (usual.turn - 4.0, usual.turn + 4.0), "of a lost cause, too"


def test_the_orders_to_compare_with_know_no_lost_causes() -> None:
    asked = [Asked(arrived=0.0, service_s=9.0), Asked(arrived=1.0, service_s=1.0), Asked(arrived=2.0, service_s=1.0)]
    assert names(line_of(fcfs, *asked)[0], 1e9) == "012"
    assert names(line_of(sjf, *asked)[0], 1e9) == "120"
    assert set(ORDERS) == {"deadline", "fcfs", "sjf"}


SECONDS = st.floats(0.0, 100.0)
ASKED = st.builds(Asked, SECONDS, st.floats(0.0, 20.0), SECONDS, SECONDS, st.floats(-20.0, 20.0))


@examples(deadline=None, max_examples=200)
@given(
    st.sampled_from(list(ORDERS.values())),
    st.lists(ASKED, max_size=20),
    st.lists(st.floats(0.0, 300.0), min_size=1, max_size=5),
    st.data(),
)
def test_a_line_is_what_sorting_all_of_it_comes_to(
    order: Order, asked: list[Asked], moments: list[float], data: st.DataObject
) -> None:
    """Against the definition, while time passes and some leave from anywhere."""
    line, ones = line_of(order, *asked)
    for now in sorted(moments):

        def key(one: One, now: float = now) -> tuple[int, float, int]:
            stand = one.stand
            if stand.late_at >= now:
                return 1, stand.rank, stand.number
            return (0 if stand.turn <= now else 2), stand.turn, stand.number

        found = list(line.in_order(now))
        assert [one for _, one in found] == sorted(ones, key=key)
        assert [at for at, _ in found] == [key(one) for _, one in found], "so that lines of accounts can be merged"
        rank = data.draw(st.sampled_from([-1e9, *(one.stand.rank for one in ones), 1e9]))
        assert line.before(rank, now) == sum(key(one) <= (1, rank, math.inf) for one in ones)
        for _ in range(data.draw(st.integers(0, len(ones)))):
            line.remove(ones.pop(data.draw(st.integers(0, len(ones) - 1))))
        assert len(line) == len(ones)
    for one in ones:
        line.remove(one)
    assert not len(line) and not list(line.in_order(1e9))


def test_who_does_not_stand_in_a_line_cannot_be_taken_out_of_it() -> None:
    line, ones = line_of(deadline, Asked(), Asked())
    line.remove(ones[0])
    with pytest.raises(AssertionError, match="stands in this line"):
        line.remove(ones[0])


# --- one server, to the end -------------------------------------------------------------------------------------------


def waits(order: Order, requests: list[tuple[float, float, float]]) -> list[float]:
    """How long each waits, of (arrival, service, SLO), in front of one server that is never idle while somebody waits
    and never breaks off."""
    line, found, now, due = Line[One](), [0.0] * len(requests), 0.0, list(enumerate(requests))[::-1]
    service = [seconds for _, seconds, _ in requests]
    before_s = 0.0
    while due or len(line):
        while due and (not len(line) or due[-1][1][0] <= now):
            number, (arrived, service_s, slo_s) = due.pop()
            now = max(now, arrived)
            line.add(One(order(Asked(arrived, slo_s, service_s, before_s), number), str(number)))
            before_s += service_s
        _, one = next(line.in_order(now))
        line.remove(one)
        number = int(one.name)
        before_s -= service[number]
        found[number] = now - requests[number][0]
        now += service[number]
    return found


TRAFFIC = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.floats(0.01, 4.0), st.sampled_from([0.01, 0.5, 5.0, 60.0])),
    min_size=2,
    max_size=40,
)


@examples(deadline=None, max_examples=400)
@given(TRAFFIC)
def test_nobody_starves_whatever_comes_after_it(gaps: list[tuple[float, float, float]]) -> None:
    """What a request may wait at most, against any traffic: as long as it can make it; or until its turn, `PATIENCE`
    times what it would wait in order of arrival; and then for those whose turn was sooner, which is no more than what
    it would wait in order of arrival, and for what is under way."""
    requests, at = [], 0.0
    for gap_s, service_s, slo_s in gaps:
        at += gap_s
        requests.append((at, service_s, slo_s))
    longest_s = max(service_s for _, service_s, _ in requests)
    by_arrival = waits(fcfs, requests)
    for one, first_come_s, waited_s in zip(requests, by_arrival, waits(deadline, requests), strict=True):
        _, service_s, slo_s = one
        fair_s = first_come_s + service_s
        assert waited_s <= max(slo_s, PATIENCE * fair_s) + fair_s + longest_s + 1e-6


def poisson(load: float, seed: int, seconds: float = 200.0) -> list[tuple[float, float, float]]:
    """Small ones of 50 ms and large ones of 500 ms, ten to one, each to begin within three times as long."""
    draw, at, found = random.Random(seed), 0.0, []
    mean_s = (10 * 0.05 + 0.5) / 11
    while at < seconds:
        at += draw.expovariate(load / mean_s)
        service_s = 0.5 if draw.random() < 1 / 11 else 0.05
        found.append((at, service_s, 3 * service_s))
    return found


def attained(requests: list[tuple[float, float, float]], waited: list[float]) -> float:
    within = [wait_s + one[1] <= one[2] for one, wait_s in zip(requests, waited, strict=True)]
    return fmean(within)


@pytest.mark.parametrize("load", [0.9, 1.0, 1.2])
def test_more_keep_their_slo_than_in_order_of_arrival_and_nobody_waits_much_longer(load: float) -> None:
    """Of usual traffic; ModServe's reason for this order."""
    points, longest = [], []
    for seed in range(5):
        requests = poisson(load, seed)
        first, least = waits(fcfs, requests), waits(deadline, requests)
        points.append(attained(requests, least) - attained(requests, first))
        longest.append(max(least) / max(first))
    assert fmean(points) > 0.15
    assert fmean(longest) < 1.5


def test_shortest_first_starves_the_long_ones_which_is_why_it_is_only_to_compare_with() -> None:
    requests = poisson(1.2, 0)
    first, shortest, least = (waits(order, requests) for order in (fcfs, sjf, deadline))
    assert max(shortest) > 1.5 * max(first) > max(least)
