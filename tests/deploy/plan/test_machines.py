"""A deployment drawn for several nodes: who is where, and what each node's own instances share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from deploy.agent.specs import orders, specs
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import Blueprint, draw
from deploy.plan.machines import HERE, Machine, Machines
from deploy.runtime.protocol import Spec
from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceProperties

GIB = 1 << 30


def cpu_node(name: str, devices: int, cores: Sequence[int] = (), gib: int = 64) -> Machine:
    host = DeviceProperties(0, "cpu", total_bytes=gib * GIB, free_bytes=gib * GIB)
    return Machine(name, DeviceInventory("cpu", tuple(range(devices))), (host,), tuple(cores), doubts=())


def drawn(layout: str, *nodes: Machine, devices: Sequence[tuple[str, int]] | None = None, **options: str) -> Blueprint:
    """`devices`: node and number of each, in the layout's order."""
    machines = Machines.of(nodes)
    ids = [machines.numbered(node, [device])[0] for node, device in devices] if devices is not None else None
    return draw(DeployConfig(layout=layout, device="cpu", **options), machines=machines, devices=ids)  # type: ignore[arg-type]


def where(blueprint: Blueprint) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = zip(blueprint.plans, specs(blueprint), strict=True)
    return {plan.id: (spec.node, spec.devices) for plan, spec in found}


def test_this_machine_alone_is_as_ever() -> None:
    alone = draw(DeployConfig(layout="(E-P)-D", engine="sim"))
    assert where(alone) == {"E0": (HERE, (0,)), "P0": (HERE, (0,)), "D0": (HERE, (1,))}
    assert [plan.devices for plan in alone.plans] == [(0,), (0,), (1,)]


def test_each_instance_is_told_its_node_and_the_numbers_of_its_devices_there() -> None:
    blueprint = drawn("(E-P)-D", cpu_node("a", 2), cpu_node("b", 2), devices=[("b", 1), ("a", 1)], engine="sim")
    assert where(blueprint) == {"E0": ("b", (1,)), "P0": ("b", (1,)), "D0": ("a", (1,))}
    for spec in specs(blueprint):
        assert spec.stage is not None and spec.plan is not None
        assert spec.stage.device_ids == spec.plan.devices == spec.devices


def test_the_same_number_on_two_nodes_is_two_devices() -> None:
    blueprint = drawn("E-P-D", *(cpu_node(name, 1) for name in "abc"), engine="sim")
    assert sorted(where(blueprint).values()) == [("a", (0,)), ("b", (0,)), ("c", (0,))]
    assert all(not plan.colocated_with for plan in blueprint.plans)


def test_the_order_in_which_nodes_are_listed_says_nothing() -> None:
    nodes = [cpu_node(name, 2) for name in "abc"]
    for some in (nodes, nodes[::-1], [nodes[1], nodes[2], nodes[0]]):
        assert specs(drawn("2E-P-2D", *some, engine="sim")) == specs(drawn("2E-P-2D", *nodes, engine="sim"))


def test_ranks_of_one_instance_are_on_one_node() -> None:
    with pytest.raises(ConfigError, match=r"there are a: 1, b: 1"):
        drawn("P:tp2-D", cpu_node("a", 1), cpu_node("b", 1), engine="sim")
    assert where(drawn("D-P:tp2", cpu_node("a", 2), cpu_node("b", 1), engine="sim")) == {
        "D0": ("b", (0,)),
        "P0": ("a", (0, 1)),
    }


def test_the_cores_of_a_node_are_divided_among_the_devices_that_it_lends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.plan.blueprint.reads_device_memory", lambda kind: "")
    nodes = [cpu_node("a", 2, range(4)), cpu_node("b", 1, range(8, 11))]
    blueprint = drawn("E-P-D", *nodes, devices=[("a", 1), ("a", 0), ("b", 0)])
    assert [spec.cores for spec in specs(blueprint)] == [(2, 3), (0, 1), (8, 9, 10)]
    alone = drawn("E-P-D", *nodes, devices=[("b", 0), ("a", 0), ("a", 1)])
    assert specs(blueprint)[1] == _named(alone, "P0"), "whoever else is on the node makes no difference"


def test_memory_is_planned_on_each_node_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.plan.blueprint.reads_device_memory", lambda kind: "")
    nodes = [cpu_node("a", 2), cpu_node("b", 1, gib=1)]
    blueprint = drawn("E-P-D", *nodes, devices=[("a", 0), ("a", 1), ("a", 0)])
    assert blueprint.memory is not None and [group.node for group in blueprint.memory.groups] == ["a"]
    with pytest.raises(ConfigError, match=r"^node b: .*this machine has 1\.0 GiB"):
        drawn("E-P-D", *nodes, devices=[("a", 0), ("a", 1), ("b", 0)])


def test_kv_between_two_nodes_takes_mooncake_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, apart = [cpu_node("a", 1), cpu_node("b", 1)], [("a", 0), ("b", 0)]
    monkeypatch.setattr("deploy.plan.blueprint.reads_device_memory", lambda kind: "it is not there")
    with pytest.raises(ConfigError, match="P0→D0 are on two nodes, where KV takes Mooncake: it is not there"):
        drawn("P-D", *nodes, devices=apart)
    with pytest.raises(ConfigError) as refused:
        drawn("P-D", *nodes, devices=apart, kv_transport="shm")
    assert refused.value.param == "kv_transport"
    monkeypatch.setattr("deploy.plan.blueprint.reads_device_memory", lambda kind: "")
    (way,) = drawn("P-D", *nodes, devices=apart).ways.kv
    assert way.transports == ("mooncake",) and way.apart


def test_an_agent_is_told_of_its_own_node_alone() -> None:
    blueprint = drawn("E-P-D", cpu_node("a", 2), cpu_node("b", 2), devices=[("a", 0), ("b", 0), ("b", 1)], engine="sim")
    there = blueprint.at("b")
    assert [(plan.id, plan.devices) for plan in there.plans] == [("P0", (0,)), ("D0", (1,))]
    assert there.inventory.ids == (0, 1) and there.machines.at("b") is blueprint.machines.at("b")
    assert there.features_travel, "its encoders are elsewhere"
    with pytest.raises(KeyError):
        blueprint.at("c")


def test_an_agent_whose_node_has_no_instance_is_told_what_may_come() -> None:
    blueprint = drawn("P-D", cpu_node("a", 2), cpu_node("b", 2), devices=[("a", 0), ("a", 1)], engine="sim")
    (order,) = orders(blueprint.at("b"))
    assert (order.spec.role, order.spec.node, order.spec.devices) == (Role.P, "b", (0,))


def test_what_a_node_says_of_itself_can_be_written_down() -> None:
    card = DeviceProperties(3, "910B3", "Ascend910B3", {"cube": 24}, 64 * GIB, 60 * GIB)
    machine = Machine("a", DeviceInventory("npu", (3,), ("910B3",)), (card,), (0, 1), (8, 3), ("old driver",))
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


def test_nodes_with_other_devices_are_not_of_one_deployment() -> None:
    with pytest.raises(ConfigError, match="there are a: cpu, b: npu"):
        Machines.of([cpu_node("a", 1), Machine("b", DeviceInventory("npu", (0,), ("910B3",)))])
    with pytest.raises(ConfigError, match="there are none"):
        Machines.of([])


def _named(blueprint: Blueprint, name: str) -> Spec:
    return next(spec for plan, spec in zip(blueprint.plans, specs(blueprint), strict=True) if plan.id == name)


def test_people_are_told_nodes_by_the_beginning_of_a_long_id_and_devices_by_their_own_numbers() -> None:
    long = "3f" * 28
    machines = Machines.of([cpu_node(long, 1), cpu_node("b", 1)])
    ids = machines.numbered("b", [0]), machines.numbered(long, [0])
    assert [machines.described(one) for one in ids] == ["b:0", "3f3f3f3f:0"]
    assert Machines.of([cpu_node(long, 2)]).described((0, 1)) == "0,1", "there is no other"
