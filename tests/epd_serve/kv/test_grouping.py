"""Group sizes: the last packet small, the rest large, and never later than any fixed size."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.errors import ConfigError
from epd_serve.kv import grouping
from epd_serve.kv.grouping import (
    AdaptiveGrouping,
    BulkGrouping,
    Cuts,
    FixedGrouping,
    LinkCost,
    Step,
    exposed_s,
    finish_s,
    parse_grouping,
    spare_s,
)
from epd_serve.kv.least_exposed import MOST_COUNTED, fewest_packets

MB = 1_000_000
EXACT = AdaptiveGrouping(floor_bytes=0, tolerance=0.0, hedge=0.0)

# Representable with few bits, so that the policy's rounding leaves them as they are and its answer must be exact.
times = st.integers(0, 200).map(lambda n: n / 64)
few_layers = st.integers(1, 10)


def steps(layers: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    idle = st.just(0.0) | times
    return st.builds(Step, layers=layers, layer_bytes=st.just(1), layer_s=times, backlog_s=idle, slack_s=idle)


costs = st.builds(LinkCost, setup_s=times, s_per_byte=times)

# What devices really give: ratios over orders of magnitude, many of them near a link that is just fast enough.
ratio = st.floats(0.5, 1.5) | st.floats(0.01, 10)
real_steps = st.builds(
    lambda layers, c, backlog: Step(layers, MB, c, backlog * c * layers),
    st.sampled_from([8, 34, 61, 80]),
    st.floats(1e-4, 0.1),
    st.just(0.0) | st.floats(0, 1.5),
)
link = st.tuples(ratio, st.floats(0, 3))  # seconds of one layer's bytes and of the setup, in layer times
floors = st.integers(0, 6 * MB)


def link_cost(step: Step, ratios: tuple[float, float]) -> LinkCost:
    return LinkCost(ratios[1] * step.layer_s, ratios[0] * step.layer_s / step.layer_bytes)


def plans(layers: int, least: int) -> Iterator[Cuts]:
    """All ways to cut so many layers into packets of at least `least`."""
    for inner in itertools.chain.from_iterable(
        itertools.combinations(range(1, layers), packets) for packets in range(layers)
    ):
        cuts = (*inner, layers)
        if all(b - a >= min(least, layers) for a, b in itertools.pairwise((0, *cuts))):
            yield cuts


@settings(deadline=None)
@given(real_steps, link, floors)
def test_cuts_grow_end_at_the_last_layer_and_respect_the_floor(
    step: Step, ratios: tuple[float, float], floor: int
) -> None:
    cuts = AdaptiveGrouping(floor).cuts(step, link_cost(step, ratios))
    assert cuts[-1] == step.layers
    for first, last in itertools.pairwise((0, *cuts)):
        assert (last - first) * step.layer_bytes >= min(max(floor, 1), step.layers * step.layer_bytes)


@settings(deadline=None)
@given(steps(few_layers), costs, st.integers(1, 4))
def test_the_exact_plan_is_the_best_of_all_and_has_the_fewest_packets_among_them(
    step: Step, cost: LinkCost, floor: int
) -> None:
    cuts = AdaptiveGrouping(floor, tolerance=0.0, hedge=0.0).cuts(step, cost)
    every = [(exposed_s(plan, step, cost), len(plan)) for plan in plans(step.layers, floor)]
    least = min(exposed for exposed, _ in every)
    assert exposed_s(cuts, step, cost) == pytest.approx(least, abs=1e-9)
    assert len(cuts) == min(packets for exposed, packets in every if exposed <= least + 1e-9)


@settings(deadline=None)
@given(real_steps, link, floors)
def test_adaptive_is_never_later_than_any_fixed_size_that_respects_the_floor(
    step: Step, ratios: tuple[float, float], floor: int
) -> None:
    cost = link_cost(step, ratios)
    exposed = exposed_s(AdaptiveGrouping(floor).cuts(step, cost), step, cost)
    rounding = 2**-13 * (step.layers * step.layer_s + finish_s((step.layers,), step, cost))
    for size in range(1, step.layers + 1):
        plan = FixedGrouping(size, f"fixed:{size}").cuts(step, cost)
        sizes = [b - a for a, b in itertools.pairwise((0, *plan))]
        if min(sizes) * step.layer_bytes >= floor:
            assert exposed <= 1.041 * exposed_s(plan, step, cost) + 2 * rounding


@settings(deadline=None)
@given(real_steps, link)
def test_rounded_inputs_cost_no_more_than_the_tolerance_says(step: Step, ratios: tuple[float, float]) -> None:
    """The same step twice, the second time off the rounding's grid by a hair: the plan is as good."""
    cost = link_cost(step, ratios)
    nearby = LinkCost(cost.setup_s * (1 + 1e-7), cost.s_per_byte * (1 - 1e-7))
    here, there = (exposed_s(EXACT.cuts(step, c), step, cost) for c in (cost, nearby))
    # both at most the rounding above the true minimum, and neither below it
    assert abs(here - there) <= 2**-11 * (step.layers * step.layer_s + finish_s((step.layers,), step, cost))


@settings(deadline=None)
@given(steps(few_layers), costs, times)
def test_a_slower_link_or_a_longer_backlog_never_exposes_less(step: Step, cost: LinkCost, more: float) -> None:
    def least(step: Step, cost: LinkCost) -> float:
        return exposed_s(EXACT.cuts(step, cost), step, cost)

    now = least(step, cost)
    slower = LinkCost(cost.setup_s + more, cost.s_per_byte + more)
    later = Step(step.layers, 1, step.layer_s, step.backlog_s + more, step.slack_s)
    patient = Step(step.layers, 1, step.layer_s, step.backlog_s, step.slack_s + more)
    assert least(step, slower) >= now - 1e-9
    assert least(later, cost) >= now - 1e-9
    assert least(patient, cost) <= now + 1e-9


def test_early_layers_travel_in_large_packets_and_the_last_one_alone() -> None:
    """1024 tokens of an 8B model at 12.5 GB/s: one layer takes a tenth of the time in which it is computed."""
    step, cost = Step(layers=34, layer_bytes=16 * MB, layer_s=0.013), LinkCost(0.0005, 1 / 12.5e9)
    cuts = AdaptiveGrouping(MB).cuts(step, cost)
    assert len(cuts) <= 4
    assert cuts[-1] - cuts[-2] == 1
    assert exposed_s(cuts, step, cost) <= 1.001 * cost.seconds(step.layer_bytes)


def test_a_packet_more_that_saves_next_to_nothing_is_not_sent() -> None:
    """A link slower than the compute is busy to the end: the first packet's wait is all that a plan can save."""
    step, cost = Step(layers=40, layer_bytes=MB, layer_s=0.001), LinkCost(0.0001, 0.004 / MB)
    exact, tolerant = EXACT.cuts(step, cost), AdaptiveGrouping(0, tolerance=0.05, hedge=0.0).cuts(step, cost)
    assert len(tolerant) < len(exact)
    assert exposed_s(tolerant, step, cost) <= 1.051 * exposed_s(exact, step, cost)


def test_a_chunk_that_others_follow_leaves_in_one_packet_when_the_link_has_time() -> None:
    cost = LinkCost(0.001, 0.001 / MB)
    ending = Step(layers=32, layer_bytes=MB, layer_s=0.003)
    continuing = Step(32, MB, 0.003, slack_s=spare_s(ending, cost))
    assert AdaptiveGrouping(MB).cuts(continuing, cost) == (32,)
    assert len(AdaptiveGrouping(MB).cuts(ending, cost)) > 1


def test_a_chunk_that_others_follow_takes_no_time_from_them() -> None:
    """The link is needed for nine tenths of every step: what a chunk sends late, the next one's packets wait for."""
    cost = LinkCost(0.0, 0.0009 / MB)
    step = Step(layers=30, layer_bytes=MB, layer_s=0.001)
    assert spare_s(step, cost) == pytest.approx(0.003)
    chunk = Step(30, MB, 0.001, slack_s=spare_s(step, cost))
    late = finish_s(AdaptiveGrouping(0).cuts(chunk, cost), chunk, cost) - 30 * 0.001
    following = Step(30, MB, 0.001, backlog_s=max(0.0, late))
    alone = exposed_s(EXACT.cuts(step, cost), step, cost)
    assert exposed_s(EXACT.cuts(following, cost), following, cost) == pytest.approx(alone, rel=0.02)


def test_more_packets_than_are_counted_still_expose_the_least() -> None:
    """80 layers, each written just when the one before has left: any larger packet is late."""
    step, cost = Step(80, MB, 0.00101), LinkCost(0.0001, 0.0009 / MB)
    cuts = EXACT.cuts(step, cost)
    assert len(cuts) > MOST_COUNTED
    assert exposed_s(cuts, step, cost) == pytest.approx(0.001, rel=0.01)


def test_an_unfinished_backlog_makes_the_first_packet_larger_not_later() -> None:
    cost = LinkCost(0.001, 0.0005 / MB)
    free, busy = Step(32, MB, 0.002), Step(32, MB, 0.002, backlog_s=0.03)
    with_backlog = AdaptiveGrouping(0).cuts(busy, cost)
    assert with_backlog[0] * busy.layer_s >= 0.02
    assert exposed_s(with_backlog, busy, cost) == pytest.approx(
        exposed_s(AdaptiveGrouping(0).cuts(free, cost), free, cost)
    )


@pytest.mark.parametrize(
    ("step", "cost"),
    [
        (Step(32, MB, 0.0), LinkCost(0.001, 1e-9)),  # compute time not known yet
        (Step(32, MB, 0.001), LinkCost(0.001, 0.0)),  # bytes cost nothing
        (Step(32, MB, 0.001), LinkCost(0.0, 0.0)),
        (Step(1, MB, 0.001), LinkCost(0.001, 1e-9)),
        (Step(32, 0, 0.001), LinkCost(0.001, 1e-9)),  # this rank has no head of this link's
    ],
)
def test_where_cutting_saves_nothing_one_packet_leaves(step: Step, cost: LinkCost) -> None:
    assert AdaptiveGrouping(MB).cuts(step, cost) == (step.layers,)


@settings(deadline=None)
@given(
    st.sampled_from([8, 34, 61, 80]),
    st.floats(1e-4, 0.1),
    st.floats(0.01, 0.5),
    st.floats(0, 0.2),
    st.floats(-0.1, 0.1),
)
def test_layers_a_tenth_quicker_or_slower_than_expected_expose_no_more_than_the_best_plan_would(
    layers: int, layer_s: float, send: float, setup: float, off: float
) -> None:
    expected, cost = Step(layers, MB, layer_s), LinkCost(setup * layer_s, send * layer_s / MB)
    real = Step(layers, MB, layer_s * (1 + off))
    best = exposed_s(EXACT.cuts(real, cost), real, cost)
    assert exposed_s(AdaptiveGrouping(0).cuts(expected, cost), real, cost) <= 1.041 * best + 2**-12 * layers * layer_s


def test_the_plan_for_exactly_the_expected_time_is_brittle() -> None:
    """Why there is a hedge: layers 8 % quicker, and the packet before the last is late."""
    step, cost = Step(34, MB, 0.01), LinkCost(0.0005, 0.004 / MB)
    quicker = Step(34, MB, 0.0092)
    exact, hedged = EXACT.cuts(step, cost), AdaptiveGrouping(0).cuts(step, cost)
    assert exposed_s(exact, step, cost) == pytest.approx(exposed_s(hedged, step, cost))
    assert exposed_s(exact, quicker, cost) > 2 * exposed_s(hedged, quicker, cost)
    assert len(hedged) <= len(exact) + 1


def test_steps_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    planner = fewest_packets
    monkeypatch.setattr(
        grouping, "fewest_packets", lambda *args, **named: plans.append(args) or planner(*args, **named)
    )
    step, cost = Step(79, 3 * MB, 0.00234), LinkCost(0.000234, 1 / 12.34e9)
    first = AdaptiveGrouping(MB).cuts(step, cost)
    planned = len(plans)
    assert planned > 0
    assert AdaptiveGrouping(MB).cuts(step, cost) == first
    assert AdaptiveGrouping(MB).cuts(Step(79, 3 * MB, 0.00234 * (1 + 1e-9)), cost) == first
    assert len(plans) == planned


@pytest.mark.parametrize("gb_per_s", [12.5, 2.0])  # the second: as slow as the compute, where the most packets are made
def test_a_plan_of_80_layers_costs_well_below_a_step(gb_per_s: float) -> None:
    """Planned in the step's way, before the first layer runs. New inputs every time, so no look-up helps.

    Counted in passes of a plain loop beside it, since processors differ by four: a pass is 3 to 9 ms of a step of 160.
    """
    step = Step(80, 4 * MB, 0.002)
    planning = passes = 0.0
    for i in range(20):
        cost = LinkCost(0.00005 + i * 1e-6, (1 + i / 1000) / (gb_per_s * 1e9))
        begun = time.thread_time()
        AdaptiveGrouping(MB).cuts(step, cost)
        planned = time.thread_time()
        sum(n * n % 7 for n in range(100_000))
        planning += planned - begun
        passes += time.thread_time() - planned
    assert planning < 1.5 * passes  # 0.12 and 0.65 of one where this was written


@pytest.mark.parametrize("text", ["adaptive", "layerwise", "bulk", "fixed:4"])
def test_a_mode_keeps_its_name(text: str) -> None:
    assert parse_grouping(text, MB).name == text


def test_modes_cut_as_they_say() -> None:
    step, cost = Step(10, MB, 0.001), LinkCost(0.001, 1e-9)
    assert parse_grouping("fixed:4", MB).cuts(step, cost) == (4, 8, 10)
    assert parse_grouping("layerwise", MB).cuts(step, cost) == tuple(range(1, 11))
    assert BulkGrouping().cuts(step, cost) == (10,)


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:-1", "fixed:x", "fixed:²", "Adaptive"])
def test_an_unknown_mode_names_the_parameter(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_grouping(text, MB)
    assert refused.value.param == "--kv-grouping"
