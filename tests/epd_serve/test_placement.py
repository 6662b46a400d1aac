"""Which layouts can serve, and which instance lands on which device."""

from __future__ import annotations

import pytest

from epd_serve.errors import ConfigError, LayoutError
from epd_serve.layout import Group, Layout, Member
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable, lower
from epd_serve.roles import Role

PAPERS = "TP1 TP2 TP1x2 (E-PD) E-PD EP-D EP+D (E-P)-D (E-D)-P E-P-D 2E-P-D (E-PD)x2 1E3P4D"
OURS = "P-D PD (P-D) E-P-PD-D E-P:tp2-D:tp2"


@pytest.mark.parametrize("spec", f"{PAPERS} {OURS}".split())
def test_layouts_of_the_papers_can_serve(spec: str) -> None:
    check_servable(parse(spec))


@pytest.mark.parametrize(
    ("spec", "position", "reason"),
    [
        ("E", 0, "no P or PD"),
        ("P", 0, "no D to decode"),
        ("D", 0, "no P or EP"),
        ("EP", 0, "no D to decode"),
        ("E-P", 2, "no D to decode"),
        ("E-D", 0, "no P or PD"),
        ("(2E-P)-PD", 4, "no D to decode"),
        ("E-PD-D", 5, "no P or EP"),
        ("E-EPD", 0, "no P or PD"),
        ("ED-P", 0, "(E-D)-P"),
        ("ED", 0, "(E-D)-P"),
    ],
)
def test_an_instance_without_work_is_refused_with_a_caret(spec: str, position: int, reason: str) -> None:
    with pytest.raises(LayoutError, match=None) as refused:
        check_servable(parse(spec))
    assert refused.value.position == position
    assert reason in refused.value.reason


@pytest.mark.parametrize("spec", ["P:tp2-D", "P-D:tp2", "E-P-D-D:tp2"])
def test_prefill_and_decode_may_differ_in_tensor_parallel_size(spec: str) -> None:
    check_servable(parse(spec))


def test_a_layout_built_in_code_gets_a_caret_in_its_canonical_text() -> None:
    layout = Layout.of([Group((Member(Role.PD),)), Group((Member(Role.D),))])
    with pytest.raises(LayoutError) as refused:
        check_servable(layout)
    assert (refused.value.spec, refused.value.position) == ("PD-D", 3)


def test_parentheses_share_a_device_and_dashes_do_not() -> None:
    encode, prefill, decode = lower(parse("(E-P)-D"), [0, 1])
    assert (encode.id, encode.devices, encode.colocated_with) == ("E0", (0,), ("P0",))
    assert (prefill.id, prefill.devices, prefill.colocated_with) == ("P0", (0,), ("E0",))
    assert (decode.id, decode.devices, decode.colocated_with) == ("D0", (1,), ())


def test_two_encoders_take_two_devices() -> None:
    layout = parse("2E-P-D")
    assert layout.device_count == 4
    assert [(plan.id, plan.devices) for plan in lower(layout, range(4))] == [
        ("E0", (0,)), ("E1", (1,)), ("P0", (2,)), ("D0", (3,)),
    ]  # fmt: skip


def test_a_count_in_parentheses_is_processes_on_one_device() -> None:
    assert [(plan.id, plan.devices) for plan in lower(parse("(2E-P)-D"), [5, 7])] == [
        ("E0", (5,)), ("E1", (5,)), ("P0", (5,)), ("D0", (7,)),
    ]  # fmt: skip


def test_a_repeated_group_takes_fresh_devices_and_numbers() -> None:
    assert [(plan.id, plan.devices, plan.colocated_with) for plan in lower(parse("(E-PD)x2"), [0, 1])] == [
        ("E0", (0,), ("PD0",)), ("PD0", (0,), ("E0",)), ("E1", (1,), ("PD1",)), ("PD1", (1,), ("E1",)),
    ]  # fmt: skip


def test_tensor_parallel_instances_take_their_devices_in_rank_order() -> None:
    plans = lower(parse("(E:tp2-P:tp2)-D"), [3, 1, 2])
    assert [(plan.id, plan.tp, plan.devices) for plan in plans] == [
        ("E0", 2, (3, 1)), ("P0", 2, (3, 1)), ("D0", 1, (2,)),
    ]  # fmt: skip


def test_too_few_devices_says_how_many_are_needed_and_found() -> None:
    with pytest.raises(ConfigError, match=r"layout E-P-D needs 3 devices, found 2: 0, 1"):
        lower(parse("E-P-D"), [0, 1])
    with pytest.raises(ConfigError, match=r"needs 1 device, found 0: none"):
        lower(parse("TP1"), [])


def test_where_devices_are_shared_a_layout_is_placed_on_those_there_are_in_turn() -> None:
    plans = lower(parse("(E-P)-D"), (3,), shared=True)

    assert [plan.devices for plan in plans] == [(3,), (3,), (3,)]
    assert [plan.colocated_with for plan in plans] == [("P0", "D0"), ("E0", "D0"), ("E0", "P0")]


def test_shared_devices_are_taken_by_turns_and_neighbours_are_those_who_really_meet() -> None:
    plans = {plan.id: plan for plan in lower(parse("E-P-D"), (0, 1), shared=True)}

    assert {name: plan.devices for name, plan in plans.items()} == {"E0": (0,), "P0": (1,), "D0": (0,)}
    assert plans["E0"].colocated_with == ("D0",)
    assert plans["P0"].colocated_with == ()


def test_sharing_changes_nothing_where_there_are_enough_devices() -> None:
    assert lower(parse("(E-P)-D"), (0, 1), shared=True) == lower(parse("(E-P)-D"), (0, 1))


def test_tensor_parallel_ranks_never_share_a_device() -> None:
    with pytest.raises(ConfigError, match="a device each"):
        lower(parse("E-PD:tp2"), (0, 1), shared=True)


def test_nobody_shares_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="found 0"):
        lower(parse("TP1"), (), shared=True)
