"""What an instance is, whatever it is called: which of them stand for each other, and what they need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from deploy.agent.specs import orders, specs
from deploy.memory.check import share_memory
from deploy.options.config import DeployConfig
from deploy.options.ways import draw_ways
from deploy.plan.blueprint import Blueprint, draw
from deploy.plan.core_plan import plan_cores
from deploy.plan.machines import Machine, Machines
from deploy.runtime.protocol import HOST_MEMORY, Spec, device_memory
from epd_serve.layout_parser import parse
from epd_serve.placement import lower
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceProperties

CARD_BYTES = 64 << 30


EIGHT_CORES = Machines((Machine("local", DeviceInventory("cpu"), cores=tuple(range(8))),))


def on_cpu(layout: str, devices: tuple[int, ...] | None = None, **options: Any) -> dict[str, Spec]:
    blueprint = draw(DeployConfig(layout=layout, device="cpu", **options), machines=EIGHT_CORES, devices=devices)
    return dict(zip((plan.id for plan in blueprint.plans), specs(blueprint), strict=True))


def on_npus(layout: str, core_share: str = "", free_bytes: int = CARD_BYTES, **options: Any) -> dict[str, Spec]:
    """As on a machine with eight cards that nobody uses."""
    blueprint = _blueprint(layout, core_share, free_bytes, **options)
    return dict(zip((plan.id for plan in blueprint.plans), specs(blueprint), strict=True))


def _blueprint(layout: str, core_share: str, free_bytes: int, **options: Any) -> Blueprint:
    made = draw(DeployConfig(layout=layout, device="cpu", **options), machines=EIGHT_CORES)
    inventory = DeviceInventory("npu", tuple(range(8)), ("Ascend910B3",) * 8)
    divided = plan_cores(core_share, lower(parse(layout), inventory.ids), "npu", None, made.facts)
    cards = [DeviceProperties(index, "910B3", total_bytes=CARD_BYTES, free_bytes=free_bytes) for index in range(8)]
    memory = share_memory(divided.plans, made.facts, inventory, made.stage_args, properties=cards)
    plans = memory.shared(divided.plans)
    ways = draw_ways(made.config, "npu", plans)
    return replace(
        made,
        machines=Machines((Machine("local", inventory, tuple(cards)),)),
        plans=plans,
        ways=ways,
        cores=None,
        core_orders=divided.orders,
        memory=memory.plan,
    )


def test_two_of_a_role_on_one_device_are_the_same_and_on_two_they_are_not() -> None:
    sim = on_cpu("2E-P-D", engine="sim")
    assert sim["E0"].digest == sim["E1"].digest and sim["E0"] != sim["E1"]
    assert replace(sim["E0"], devices=sim["E1"].devices) == sim["E1"]
    assert len({spec.digest for spec in on_cpu("E-P-D").values()}) == 3


def test_neighbours_on_cpu_make_no_difference_because_no_stage_sees_them() -> None:
    apart, together = on_cpu("E-P-D"), on_cpu("(E-P)-D", devices=(1, 2))
    assert apart["P0"] == together["P0"], "on device 1 both times"
    assert apart["D0"] == together["D0"]
    assert apart["E0"] != together["E0"], "its device is another"


def test_neighbours_on_a_card_make_one_because_they_have_a_part_of_its_memory() -> None:
    alone, beside = on_npus("P-D")["P0"], on_npus("(P-D)")["P0"]
    assert alone.devices == beside.devices and alone != beside


def test_whoever_has_to_do_with_features_is_another_than_without() -> None:
    assert on_cpu("EP-D")["D0"] != on_cpu("E-P-D", devices=(0, 2, 1))["D0"]
    assert [spec.featured for spec in on_cpu("EP-D").values()] == [False, False]
    assert [spec.featured for spec in on_cpu("E-P-D").values()] == [True, True, True]


def test_flags_and_options_that_reach_a_stage_make_it_another() -> None:
    plain = on_cpu("P-D")
    seeded = on_cpu("P-D", stage_args=("D:--seed 3",))
    assert plain["P0"] == seeded["P0"] and plain["D0"] != seeded["D0"]
    assert plain["P0"] != on_cpu("P-D", kv_grouping="fixed:3")["P0"]
    assert plain["P0"] == on_cpu("P-D", port=9999, workers=3)["P0"]


def test_names_of_neighbours_do_not_count_and_their_shares_do() -> None:
    second, first = on_npus("(E-P)x2-D", core_share="E=0.3,P=0.7"), on_npus("D-(E-P)", core_share="E=0.3,P=0.7")
    assert second["E1"] == first["E0"] and second["P1"] == first["P0"], "on card 1 both times"
    assert first["E0"] != on_npus("D-(E-P)", core_share="E=0.4,P=0.6")["E0"]


def test_cores_of_a_cpu_reach_a_stage_while_it_runs_and_make_it_no_other_one() -> None:
    first, other = (on_cpu("(E-P)-D", core_share=text) for text in ("E=0.25,P=0.75", "E=0.75,P=0.25"))
    assert first == other and (len(first["E0"].cores), len(other["E0"].cores)) == (1, 3)
    assert first["E0"] != on_cpu("(E-P)-D")["E0"], "one without a share obeys none"


def test_what_an_instance_needs_is_what_the_memory_plan_gives_it() -> None:
    assert {what for spec in on_cpu("E-P-D").values() for what in spec.needs} == {HOST_MEMORY}
    wide = on_npus("P:tp2-D")
    assert set(wide["P0"].needs) == {device_memory(0), device_memory(1)}
    shared = on_npus("(E-P)-D")
    (one,) = shared["E0"].needs.values()
    assert 0 < one + shared["P0"].needs[device_memory(0)] <= CARD_BYTES
    assert on_cpu("P-D", engine="sim")["P0"].needs == {}, "nobody knows what a simulated one takes"


@pytest.mark.parametrize("layout", ["P-D", "(E-P)-D", "(E-P-D)", "TP1"])
@pytest.mark.parametrize("free_gib", [64, 60, 59, 40])
def test_a_layout_that_was_accepted_fits_on_cards_where_nothing_of_ours_runs(layout: str, free_gib: int) -> None:
    """What an engine keeps outside its budget may be more than is free beside 92 % of a card."""
    taken: Counter[str] = Counter()
    for spec in on_npus(layout, free_bytes=free_gib << 30).values():
        taken.update(spec.needs)
    assert taken and max(taken.values()) <= free_gib << 30


def test_the_first_orders_have_the_names_of_the_layout() -> None:
    blueprint = draw(DeployConfig(layout="(E-P)-D", device="cpu"))
    assert [order.id for order in orders(blueprint)] == ["E0", "P0", "D0"]
    assert [order.spec for order in orders(blueprint)] == list(specs(blueprint))
