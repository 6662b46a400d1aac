"""Devices of the next layout: who can stay does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.change.place import place
from deploy.plan.machines import Machine, Machines, node_index
from deploy.runtime.protocol import Spec
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from npu_ops.discovery import DeviceInventory
from tests.deploy.change.worlds import wanted


def placed(new: str, old: str, *, pool: int = 8, both: bool = False) -> tuple[int, ...]:
    found = place(parse(new), range(pool), wanted(old, pool=pool, both=both).specs)
    return tuple(device for devices in found for device in devices)


@pytest.mark.parametrize(
    ("old", "new", "devices"),
    [
        ("EP-D", "EP-D", (0, 1)),
        ("EP-D", "E-P-D", (2, 3, 1)),  # D stays; where EP is nobody has to go first
        ("E-P-D", "P-D", (1, 2)),
        ("(E-P)-D", "E-(E-P)-D", (2, 0, 1)),
        ("P:tp2-D", "D-P:tp2", (2, 0, 1)),
        ("TP1x2", "(E-PD)x2", (2, 3)),
    ],
)
def test_who_can_stay_does(old, new, devices):
    assert placed(new, old) == devices


def test_devices_in_use_are_taken_where_no_others_are_left():
    assert placed("E-P-D", "EP-D", pool=3) == (2, 0, 1)


def test_an_instance_with_both_halves_stays_in_its_part_or_else_by_a_flip():
    assert placed("D-P", "P-E", both=True) == (2, 0)
    assert placed("D-E", "P-E", both=True) == (0, 1)


def test_a_group_that_finds_no_room_gets_nothing():
    assert place(parse("E-P:tp2-D"), range(3), wanted("D", pool=3).specs) == ((), (1, 2), (0,))


def test_devices_of_those_that_leave_may_be_left_alone():
    running = wanted("EP-D", pool=3).specs
    assert place(parse("E-P-D"), range(3), running, beside_leaving=False) == ((2,), (), (1,))


def on_nodes(*sizes: int) -> list[int]:
    """Global ids of nodes with so many devices each."""
    nodes = Machines.of(
        [Machine(f"n{at}", DeviceInventory("npu", tuple(range(size)), ("",) * size)) for at, size in enumerate(sizes)]
    )
    return list(nodes.inventory.ids)


def nodes_of(layout: str, pool: list[int]) -> list[int | None]:
    """The node of each group."""
    found = place(parse(layout), pool, [])
    for devices in found:
        assert len({node_index(device) for device in devices}) <= 1, "a group is on one node"
    return [node_index(devices[0]) if devices else None for devices in found]


def test_a_wide_instance_is_on_one_node_whoever_comes_before_it_in_the_layout():
    assert nodes_of("D-P:tp2", on_nodes(2, 1)) == [1, 0]
    assert nodes_of("D-P:tp2", on_nodes(1, 1, 1)) == [0, None]
    assert nodes_of("3E-P:tp2-D:tp4", on_nodes(4, 3, 2)) == [1, 2, 2, 1, 0]


def test_who_exchange_kv_or_features_are_on_one_node_where_that_is_free():
    assert nodes_of("2P-2D", on_nodes(2, 2)) == [0, 1, 0, 1]
    assert nodes_of("E-P-D", on_nodes(2, 3)) == [1, 1, 1]


def test_who_runs_stays_and_others_come_to_his_node():
    pool = on_nodes(3, 3)
    running = [Spec(Role.D, (pool[at],), "D") for at in (3, 4)]
    assert place(parse("P-2D"), pool, running) == ((pool[5],), (pool[3],), (pool[4],))


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.lists(st.sampled_from(("E", "P", "D", "P:tp2", "D:tp4", "(E-P)", "(E:tp2-P:tp2)")), min_size=1, max_size=6),
)
def test_no_device_is_given_twice_and_as_much_finds_room_as_can(sizes, groups):
    pool, layout = on_nodes(*sizes), parse("-".join(groups))
    found = place(layout, pool, [])
    given_ = [device for devices in found for device in devices]
    assert len(given_) == len(set(given_)) and set(given_) <= set(pool)
    widths = [group.tp for group in layout.groups for _ in range(group.repeat)]
    assert [len(devices) in (0, width) for devices, width in zip(found, widths, strict=True)]
    assert all(found) is fits(sorted(widths, reverse=True), sizes)


def fits(widths: list[int], sizes: list[int]) -> bool:
    """By trying all."""
    if not widths:
        return True
    first, *others = widths
    return any(
        size >= first and fits(others, [*sizes[:at], size - first, *sizes[at + 1 :]])
        for at, size in enumerate(sizes)
        if size not in sizes[:at]
    )
