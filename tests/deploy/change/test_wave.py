"""What a change may begin, and what it never does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deploy.change import wave as rules
from deploy.change.limits import required, served, shortage
from deploy.change.types import Actual, Drain, Plan, Shortage, Start, Stop, Wanted, carried_out
from deploy.change.wave import diff, match, reached, settled, wave
from deploy.runtime.protocol import HOST_MEMORY, SHARED_MEMORY, Observed, Phase
from epd_serve.roles import Role
from tests.deploy.change.worlds import GIB, World, kinds_of, node, up, wanted

LAYOUTS = (
    "TP1",
    "TP1x2",
    "EP-D",
    "E-P-D",
    "(E-P)-D",
    "(E-D)-P",
    "(E-PD)",
    "(E-PD)x2",
    "2E-2P-2D",
    "E-PD",
    "P-3D",
    "3P-D",
)

layouts = st.sampled_from(LAYOUTS)
chances = st.integers(0, 2**32).map(random.Random)


def actual(layout: str, *, both: bool = False, gib: int | None = None, kind: str = "cpu", devices: int = 8) -> Actual:
    return Actual((node(devices, gib=gib, kind=kind),), up(wanted(layout, pool=devices, both=both)))


def next_wanted(layout: str, now: Actual, *, both: bool = False, devices: int = 8) -> Wanted:
    return wanted(layout, pool=devices, running=[one.order.spec for one in now.instances], both=both)


def test_nothing_is_done_where_all_is_as_wanted():
    now = actual("(E-P)-D")

    assert wave(wanted("(E-P)-D"), now) == ()
    assert diff(wanted("(E-P)-D"), now) == Plan(())


def test_an_encoder_is_added_beside_what_runs():
    now = actual("(E-P)-D")

    plan = diff(wanted("(E-P)-D-E"), now)

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Start E1"]]


def test_what_is_too_much_is_drained_and_then_stopped():
    plan = diff(wanted("(E-P)-D"), actual("(E-P)-D-E"))

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Drain E1"], ["Stop E1"]]


def test_the_old_way_goes_when_the_new_one_is_up():
    now = replace(actual("TP1"), required=frozenset({"text", "media"}))

    plan = diff(wanted("P-D", running=[one.order.spec for one in now.instances]), now)

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Start P0", "Start D0"], ["Drain EPD0"], ["Stop EPD0"]]


def test_where_there_is_no_room_beside_the_last_path_it_is_refused_with_what_is_short():
    now = replace(actual("TP1", gib=10, devices=1), required=frozenset({"text", "media"}))

    refused = diff(wanted("(P-D)", pool=1, P=5, D=5), now)

    assert isinstance(refused, Shortage)
    assert (refused.what, refused.blocks, refused.pause_helps) == ("memory of device 0", ("EPD0",), True)
    assert (refused.needed, refused.free) == (5 << 30, 2 << 30)


def test_with_a_pause_it_goes_while_new_requests_wait():
    now = replace(actual("TP1", gib=10, devices=1), required=frozenset({"text", "media"}))

    plan = diff(wanted("(P-D)", pool=1, P=5, D=5), now, may_pause=True)

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [
        ["Pause"],
        ["Drain EPD0"],
        ["Stop EPD0"],
        ["Start P0", "Start D0"],
        ["Resume"],
    ]


def test_every_pair_of_workers_that_hand_over_kv_takes_shared_memory():
    now = actual("P:tp2-D")
    shm = replace(now.nodes[0], room={SHARED_MEMORY: 300}, staging_bytes=64, arena_bytes=100)
    now = replace(now, nodes=(shm,))

    refused = diff(wanted("P:tp2-D:tp2-D", running=[one.order.spec for one in now.instances]), now)

    assert isinstance(refused, Shortage)
    assert (refused.what, refused.needed, refused.free) == (SHARED_MEMORY, 64 * 2, 300 - 100 - 64 * 2)


def test_a_pause_does_not_help_where_there_is_never_room():
    refused = diff(wanted("(P-D)", pool=1, P=9, D=9), actual("TP1", gib=10, devices=1), may_pause=True)

    assert isinstance(refused, Shortage)
    assert not refused.pause_helps


def test_room_is_made_by_as_few_as_can_be_spared():
    now = actual("TP1x2", gib=10, devices=2)
    now = replace(now, required=frozenset({"text", "media", "fused"}))

    plan = diff(wanted("TP1-PD", pool=2, running=[one.order.spec for one in now.instances]), now)

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Drain EPD1"], ["Stop EPD1"], ["Start PD0"]]


def test_room_for_a_wide_instance_is_made_by_all_that_are_in_its_way_after_few_looks(monkeypatch):
    """Of 24 instances 8 certain ones have to go first: among as many sets as there are nobody would find them."""
    looks = []
    monkeypatch.setattr(rules, "shortage", lambda *about: looks.append(about) or shortage(*about))
    now = replace(actual("TP1x24", gib=10, devices=24), required=frozenset({"text", "media"}))

    plan = diff(wanted("TP8x2", pool=24), now)

    assert isinstance(plan, Plan)
    assert [len(turn) for turn in plan.waves[:3]] == [8, 8, 1] and kinds_of(plan.waves[2])[0].startswith("Start")
    assert len(looks) < 500


def test_room_is_made_by_smaller_ones_where_the_largest_cannot_be_spared_with_them():
    """Whoever takes most goes first; here that leads nowhere, since one of the others would have to go as well."""
    sizes = {"PD": 8, "P": 5, "D": 5}
    there = [replace(spec, needs={HOST_MEMORY: sizes[spec.role.value] * GIB}) for spec in wanted("PD-P-D").specs]
    larger = replace(there[0], digest="larger", needs={HOST_MEMORY: 12 * GIB})
    machine = replace(node(), room={HOST_MEMORY: 20 * GIB})
    now = Actual((machine,), up(Wanted("PD-P-D", tuple(there))), required=frozenset({"text"}))

    plan = diff(Wanted("PD", (larger,)), now)

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves[:3]] == [
        ["Drain P0", "Drain D0"],
        ["Stop P0", "Stop D0"],
        ["Start PD1"],
    ]


def test_parts_change_without_a_start_where_an_instance_has_both_halves():
    now = replace(actual("2P-2D", both=True), required=frozenset({"text", "media"}))

    plan = diff(wanted("P-3D", both=True), now)

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Leave P1"], ["Flip P1"]]


def test_the_last_prefill_and_the_last_decode_swap_in_an_order_that_keeps_both():
    now = replace(actual("P-2D", both=True), required=frozenset({"text", "media"}))
    swapped = wanted("D-P-D", both=True)

    plan = diff(swapped, now)

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Flip D0"], ["Leave P0"], ["Flip P0"]]


def test_the_only_prefill_and_the_only_decode_swap_in_a_pause_alone():
    now = replace(actual("(E-P)-D", both=True), required=frozenset({"text", "media"}))
    swapped = next_wanted("(E-D)-P", now, both=True)

    refused, plan = diff(swapped, now), diff(swapped, now, may_pause=True)

    assert isinstance(refused, Shortage)
    assert (refused.what, refused.where, refused.pause_helps) == ("last path", "media, text", True)
    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Pause"], ["Leave P0", "Flip D0"], ["Flip P0"], ["Resume"]]


def test_nothing_is_drained_while_something_required_is_between_two_lives():
    now = replace(actual("EP-D-EPD", gib=10, devices=3), required=frozenset({"text", "media"}))
    there = [replace(one, phase=Phase.DOWN) if one.order.id == "D0" else one for one in now.instances]
    there = [one for one in there if one.order.id != "EPD0"]

    assert wave(wanted("EPD-EPD", pool=2), replace(now, instances=tuple(there))) == ()


def test_what_goes_waits_for_all_that_come():
    now = replace(actual("TP1x3"), required=frozenset({"text", "media"}))
    goal = wanted("TP1-2PD", running=[one.order.spec for one in now.instances])
    started = wave(goal, now)
    assert isinstance(started, tuple)
    for action in started:
        now = carried_out(action, now)

    half = [replace(one, phase=Phase.UP) if one.order.id == "PD0" else one for one in now.instances]

    assert kinds_of(started) == ["Start PD0", "Start PD1"]
    assert wave(goal, replace(now, instances=tuple(half))) == ()


def test_no_more_room_is_made_while_some_is_being_made():
    now = replace(actual("TP1x3", gib=10, devices=3), required=frozenset({"text", "media"}))
    goal = wanted("TP1-2PD", pool=3, running=[one.order.spec for one in now.instances])
    drained = wave(goal, now)
    assert isinstance(drained, tuple)
    assert kinds_of(drained) == ["Drain EPD1"]

    assert wave(goal, carried_out(drained[0], now)) == ()


def test_nobody_flips_who_is_what_is_wanted():
    now = actual("(P-D)", both=True)

    assert wave(wanted("(D-P)", both=True), now) == ()


@pytest.mark.parametrize("phase", [Phase.DOWN, Phase.STARTING])
def test_a_path_whose_stage_is_between_two_lives_is_required_all_the_same(phase):
    now = actual("EP-D")
    there = tuple(replace(one, phase=phase) if one.order.id == "D0" else one for one in now.instances)

    assert required(wanted("TP1"), replace(now, instances=there)) == {"text", "media", "fused"}


def test_a_plan_counts_on_a_stage_that_is_between_two_lives():
    now = actual("EP-D")
    there = tuple(replace(one, phase=Phase.DOWN) if one.order.id == "D0" else one for one in now.instances)

    plan = diff(wanted("EP-D-E", running=[one.order.spec for one in there]), replace(now, instances=there))

    assert isinstance(plan, Plan)
    assert "Start E0" in kinds_of(plan.waves[0])


def test_one_that_drains_is_taken_back_when_it_is_wanted_again():
    now = actual("(E-P)-D-E")
    there = tuple(replace(one, phase=Phase.DRAINING) if one.order.id == "E1" else one for one in now.instances)

    now_again = wave(wanted("(E-P)-D-E"), replace(now, instances=there))

    assert isinstance(now_again, tuple)
    assert kinds_of(now_again) == ["Start E1"]


def test_one_that_never_answered_is_taken_away_and_tried_anew():
    now = actual("P-D")
    there = tuple(replace(one, phase=Phase.DOWN, over=True) if one.order.id == "D0" else one for one in now.instances)

    again = wave(wanted("P-D"), replace(now, instances=there))

    assert isinstance(again, tuple)
    assert kinds_of(again) == ["Start D1", "Stop D0"]


def test_neighbours_on_a_device_that_measures_memory_start_one_after_the_other():
    plan = diff(wanted("(P-D)", pool=1), Actual((node(1, gib=80, kind="npu"),), ()))

    assert isinstance(plan, Plan)
    assert [kinds_of(turn) for turn in plan.waves] == [["Start P0"], ["Start D0"]]


@settings(max_examples=300, deadline=None)
@given(layouts, layouts, chances, st.booleans(), st.sampled_from([None, 80, 16, 10]), st.booleans())
def test_every_change_that_is_not_refused_ends_at_what_is_wanted(old, new, chance, both, gib, may_pause):
    now = actual(old, both=both, gib=gib)
    goal = next_wanted(new, now, both=both)
    now = replace(now, required=required(goal, now))
    planned = diff(goal, now, may_pause=may_pause)
    world = World(chance, now)

    whole = world.reach(goal, may_pause=may_pause)

    assert whole is isinstance(planned, Plan)
    assert not world.actual.paused
    if whole:
        assert len(world.asked) <= 4 * (len(now.instances) + len(goal.specs)) + 2


@settings(max_examples=300, deadline=None)
@given(layouts, layouts, chances, st.booleans())
def test_starts_that_fail_and_instances_that_die_hold_up_a_change_and_cost_no_path(old, new, chance, both):
    now = actual(old, both=both)
    goal = next_wanted(new, now, both=both)
    assume(isinstance(diff(goal, replace(now, required=required(goal, now))), Plan))
    world = World(chance, now, fails=True)

    assert world.reach(goal, most=4000)


@settings(max_examples=200, deadline=None)
@given(layouts, layouts, layouts, chances, st.booleans(), st.integers(0, 30))
def test_a_change_that_is_taken_back_midway_leads_back(old, new, other, chance, both, turns):
    """`old`, then towards `new` for some turns, then `other` is wanted, which may be `old`."""
    now = actual(old, both=both)
    goal = next_wanted(new, now, both=both)
    world = World(chance, replace(now, required=required(goal, now)))
    for _ in range(turns):
        now_asked = wave(goal, world.actual)
        for action in now_asked if isinstance(now_asked, tuple) else ():
            world.carry_out(action)
        world.something_happens()

    last = next_wanted(other, world.actual, both=both)
    assume(isinstance(diff(last, replace(world.actual, required=required(last, world.actual))), Plan))

    assert world.reach(last)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(("TP1", "TP1x2", "P-D", "EP-D", "(E-P)-D")),
    st.sampled_from(("TP1", "P-D", "EP-D", "(P-D)", "TP1x2")),
)
def test_a_refusal_is_right_no_order_of_single_steps_leads_there(old, new):
    now = actual(old, gib=12, devices=3)
    goal = next_wanted(new, now, devices=3)
    now = replace(now, required=required(goal, now))
    refused = isinstance(diff(goal, now), Shortage)

    assert refused is not _some_order_leads_there(goal, now)


def _some_order_leads_there(goal: Wanted, now: Actual) -> bool:
    """Breadth first: one start of a wanted spec or one drain and stop at a time, each legal by itself."""
    seen: set[tuple[tuple[Role, tuple[int, ...]], ...]] = set()
    edge = [now]
    while edge:
        here = edge.pop()
        if reached(goal, here):
            return True
        mark = tuple(sorted((one.order.spec.role, one.order.spec.devices) for one in here.instances))
        if mark in seen:
            continue
        seen.add(mark)
        found = match(goal, here.instances)
        for spec in found.missing:
            if shortage(spec, here.instances, here) is None:
                name = next(
                    n
                    for n in (f"{spec.role.value}{i}" for i in range(99))
                    if n not in {o.order.id for o in here.instances}
                )
                edge.append(settled(carried_out(Start(name, spec), here)))
        for one in found.surplus:
            drained = carried_out(Drain(one.order.id), here)
            if here.required <= served(drained.instances):
                edge.append(settled(carried_out(Stop(one.order.id), drained)))
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deployment_starts_by_the_same_rules_from_nothing(layout):
    world = World(random.Random(1), Actual((node(),), ()))

    assert world.reach(wanted(layout))
    assert {one.order.spec.role for one in world.actual.instances} == {spec.role for spec in wanted(layout).specs}


def test_an_id_is_not_given_twice_while_its_bearer_is_there():
    now = actual("2P-D")
    there: tuple[Observed, ...] = tuple(one for one in now.instances if one.order.id != "P0")

    again = wave(wanted("3P-D", running=[one.order.spec for one in there]), replace(now, instances=there))

    assert isinstance(again, tuple)
    assert kinds_of(again) == ["Start P0", "Start P2"]
    assert Role.P in {one.order.spec.role for one in there}


def test_other_cores_are_told_to_those_that_are_up_and_nobody_is_started_for_them():
    there = [replace(spec, cores=(at,)) for at, spec in enumerate(wanted("PD-P-D").specs)]
    goal = Wanted("PD-P-D", (there[0], *(replace(spec, cores=(8, 9)) for spec in there[1:])))
    now = Actual((node(),), up(Wanted("PD-P-D", tuple(there))))
    plan = diff(goal, now)
    assert isinstance(plan, Plan) and [kinds_of(turn) for turn in plan.waves] == [["Share P0", "Share D0"]]
    first, *others = now.instances
    down = replace(now, instances=(first, *(replace(one, phase=Phase.DOWN) for one in others)))
    assert wave(goal, down) == (), "they are told once they are up again"
