"""What a layout wants of devices that are lent, and that it stays the same for those who stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deploy.control.aim import Aim
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.plan.machines import Machine, Machines
from deploy.runtime.protocol import Spec
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceProperties
from tests.deploy.fake_leases import FakeLeases

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed, for KV between nodes."""
    monkeypatch.setattr("deploy.plan.blueprint.reads_device_memory", lambda kind: "")


def machine(name: str, cards: int, gib: int = 64) -> Machine:
    """With Ascend cards that nobody uses."""
    ids = tuple(range(cards))
    properties = (
        DeviceProperties(card, "910B3", "Ascend910B3", total_bytes=gib * GIB, free_bytes=gib * GIB) for card in ids
    )
    return Machine(name, DeviceInventory("npu", ids, ("910B3",) * cards), tuple(properties), doubts=())


def aiming(layout: str, *nodes: Machine) -> tuple[Aim, FakeLeases]:
    leases = FakeLeases({node.id: len(node.inventory.ids) for node in nodes}, kind="npu")
    return Aim(draw(DeployConfig(layout=layout), machines=Machines.of(nodes)), leases), leases


def where(those: Sequence[Spec]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(spec.role.value, spec.node, spec.devices) for spec in those]


async def test_who_stays_is_the_same_wherever_the_others_are_or_whether_they_have_a_place() -> None:
    """Else all of them would be started again when a node dies."""
    nodes = [machine("a", 1), machine("b", 1), machine("c", 1, gib=48)]
    aim, leases = aiming("(E-P)-D", *nodes)
    leases.others["c"] = 1
    first = await aim("(E-P)-D", ())
    assert where(first.specs) == [("E", "a", (0,)), ("P", "a", (0,)), ("D", "b", (0,))]

    leases.dies("b")
    aim.machines = Machines.of([nodes[0], nodes[2]])
    waits = await aim.again("(E-P)-D", first.specs)
    assert waits.specs == first.specs[:2] and where(waits.waiting) == [("D", "", (0,))]
    assert waits.roles == first.roles and waits.waits == "a node with room"

    leases.others.clear()
    leases.comes("c", 1)
    healed = await aim.again("(E-P)-D", waits.specs)
    assert healed.specs[:2] == first.specs[:2] and where(healed.specs[2:]) == [("D", "c", (0,))]
    assert not healed.waiting and not healed.waits


async def test_a_part_of_the_memory_of_a_card_is_not_a_matter_of_other_nodes() -> None:
    aim, _ = aiming("(E-P)-D", machine("a", 2), machine("b", 2, gib=24))
    (e, p, _) = (await aim("(E-P)-D", ())).specs
    (e_too, p_too, *others) = (await aim("(E-P)-2D-P", [e, p])).specs
    assert (e_too, p_too) == (e, p) and {spec.node for spec in others} == {"a", "b"}


async def test_ranks_of_one_instance_are_leased_on_one_node() -> None:
    aim, leases = aiming("P:tp2-D", machine("a", 1), machine("b", 2))
    wanted = await aim("P:tp2-D", ())
    assert where(wanted.specs) == [("P", "b", (0, 1)), ("D", "a", (0,))]
    assert leases.calls == ["acquire [2, 1]"]


async def test_what_is_leased_already_is_used_before_more_is_leased() -> None:
    aim, leases = aiming("P-D", machine("a", 4))
    wanted = await aim("P-D", ())
    leases.calls.clear()
    assert (await aim("D-P", wanted.specs)).specs[0] in wanted.specs
    assert (await aim("2P-D", wanted.specs)).specs and leases.calls == ["acquire [1]"]


async def test_a_node_that_has_leases_and_is_not_known_yet_is_waited_for() -> None:
    nodes = [machine("a", 1), machine("b", 1)]
    aim, _ = aiming("P-D", *nodes)
    wanted = await aim("P-D", ())
    aim.machines = Machines.of(nodes[:1])
    waits = await aim.again("P-D", wanted.specs)
    assert len(waits.specs) == len(waits.waiting) == 1 and waits.waits == "node b to join"
    assert aim.unused(waits, waits.specs, await aim.leases.places()) == []  # type: ignore[union-attr]


async def test_shares_that_are_wanted_hold_for_every_layout_that_has_the_names() -> None:
    cores = Machines((Machine("local", DeviceInventory("cpu"), cores=tuple(range(8))),))
    aim = Aim(draw(DeployConfig(layout="(E-P)-D", device="cpu", core_share="E=0.25,P=0.75"), machines=cores))
    assert aim.first().core_share == "E=0.25,P=0.75"
    moved = await aim("(E-P)-D", aim.first().specs, core_share="E=0.5,P=0.5")
    assert moved.specs == aim.first().specs and [len(spec.cores) for spec in moved.specs[:2]] == [2, 2]
    more = await aim("(E-P)x2-D", moved.specs, core_share=moved.core_share)
    assert more.core_share == "E=0.5,P=0.5"
    assert (await aim.again("(E-P)-D", moved.specs, core_share=moved.core_share)).specs[0].cores == moved.specs[0].cores
    other = await aim("(E-P)-D", moved.specs, core_share="PD=0.5")
    assert other.core_share == "E=0.25,P=0.75", "there is no PD: those of the launch"
