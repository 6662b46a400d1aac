"""Changes while nodes die, come back and fall silent, and while other controllers follow the one that began."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.change.limits import required
from deploy.change.types import Actual, Plan, Start, Wanted
from deploy.change.wave import diff, wave
from deploy.runtime.protocol import Observed, Phase
from tests.deploy.change.worlds import Nodes, World, kinds_of, node, up, wanted

LAYOUTS = ("EPD", "2EPD", "EP-D", "E-P-D", "(E-P)-D", "(E-D)-P", "(E-PD)x2", "2E-2P-2D", "E-PD", "P:tp2-3D", "3P-D")

layouts = st.sampled_from(LAYOUTS)


def actual(layout: str, *, gib: int, devices: int) -> Actual:
    """On one node."""
    return Actual((node(devices, gib=gib),), up(wanted(layout, pool=devices)))


def started(nodes: Nodes, layout: str) -> tuple[Actual, Wanted]:
    goal = nodes.wanted(layout)
    return Actual(nodes.alive(), up(goal)), goal


def test_what_was_lost_with_its_node_is_all_that_is_started():
    nodes = Nodes(2, 2)
    now, goal = started(nodes, "E-P-D")
    lost = [one.order.id for one in now.instances if one.order.spec.node == "n1"]
    world = World(random.Random(1), now)
    nodes.dead.add("n1")
    world.loses("n1")

    goal = nodes.wanted("E-P-D", goal.specs)
    assert len(goal.waiting) == len(lost) == 1
    assert diff(goal, world.actual) == Plan(()), "nothing can be done about who has no place"

    nodes.dead.clear()
    world.actual = _with(nodes, world.actual)
    plan = diff(nodes.wanted("E-P-D", goal.specs), world.actual)
    assert isinstance(plan, Plan) and [kinds_of(turn) for turn in plan.waves] == [[f"Start {lost[0]}"]]


def test_the_same_number_on_another_node_is_another_device():
    now, _ = started(Nodes(1, 1), "P-D")
    assert [one.order.spec.devices for one in now.instances] == [(0,), (0,)]
    npus = tuple(replace(one, kind="npu") for one in now.nodes)
    there = (Observed(now.instances[0].order, Phase.STARTING),)
    goal = Wanted("P-D", tuple(one.order.spec for one in now.instances))
    turn = wave(goal, Actual(npus, there))
    assert isinstance(turn, tuple) and kinds_of(turn) == ["Start D0"]


def test_a_path_that_a_death_has_taken_keeps_nobody_from_making_room():
    now, goal = actual("EP-D", gib=10, devices=2), wanted("EPD", pool=1)
    assert required(goal, now) == {"text", "media", "fused"}
    alone = replace(now, instances=tuple(one for one in now.instances if one.order.id == "EP0"))

    turn = wave(goal, _beginning(goal, alone))

    assert isinstance(turn, tuple) and kinds_of(turn) == ["Drain EP0"]


@settings(max_examples=400, deadline=None)
@given(layouts, layouts, st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([None, 16, 10]))
def test_whatever_happens_to_nodes_a_change_ends_at_what_is_wanted_and_takes_no_path(old, new, seed, turns, gib):
    """`World.carry_out` holds each action against what none may do; paths that a death takes are nobody's fault."""
    chance, nodes = random.Random(seed), Nodes(4, 3, 2, gib=gib)
    now, goal = started(nodes, old)
    world = World(chance, now, fails=True)
    goal = nodes.wanted(new, goal.specs)
    world.actual = _beginning(goal, world.actual)
    for _ in range(turns):
        asked = wave(goal, world.actual)
        for action in asked if isinstance(asked, tuple) else ():
            world.carry_out(action)
            assert not isinstance(action, Start) or action.spec.node not in nodes.dead
        world.something_happens()
        goal = _something_with_nodes(nodes, world, goal)
        world.actual = _beginning(goal, world.actual)
    nodes.dead.clear()
    world.actual = _beginning(goal, _with(nodes, world.actual))
    goal = nodes.wanted(goal.layout, goal.specs)
    assert not goal.waiting
    reachable = isinstance(diff(goal, world.actual), Plan)

    assert world.reach(goal, most=4000) or not reachable


def _something_with_nodes(nodes: Nodes, world: World, goal: Wanted) -> Wanted:
    """What is wanted after it: the same layout where there is room."""
    chance = world.chance
    what = chance.choice(("nothing", "nothing", "dies", "comes", "silent", "another controller"))
    if what == "dies" and len(nodes.alive()) > 1:
        node = chance.choice(nodes.alive()).id
        nodes.dead.add(node)
        world.loses(node)
    elif what == "comes" and nodes.dead:
        nodes.dead.discard(chance.choice(sorted(nodes.dead)))
    elif what == "silent":
        world.falls_silent(chance.choice(nodes.alive()).id)
    elif what == "another controller":  # which knows what runs, and the layout
        goal = Wanted(goal.layout, tuple(one.order.spec for one in world.actual.instances))
    world.actual = _with(nodes, world.actual)
    there = {node.id for node in nodes.alive()}
    return nodes.wanted(goal.layout, [spec for spec in goal.specs if spec.node in there])


def _with(nodes: Nodes, now: Actual) -> Actual:
    return replace(now, nodes=nodes.alive())


def _beginning(goal: Wanted, now: Actual) -> Actual:
    return replace(now, required=required(goal, now))
