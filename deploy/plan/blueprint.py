"""Everything decided before the first process starts: model, layout, devices, flags. Made by `draw`; no side effects.

All that can be wrong with the operator's input is found here, in one line, in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from deploy.doctor.preflight import preflight
from deploy.host.environment import environment
from deploy.memory.check import NO_MEMORY, OneStage
from deploy.memory.placement_table import short_node
from deploy.memory.plan import MemoryPlan
from deploy.memory.shared_memory import usual_arena_mib
from deploy.options.config import DeployConfig
from deploy.options.engines import checked_profile
from deploy.options.mooncake import check_feature_transfer, choose_pool, client_warnings, reads_device_memory
from deploy.options.stage_args import StageArgs, check_alike, parse_stage_args, waits_for_decode
from deploy.options.versions import installed_vllm, numbers
from deploy.options.ways import Ways, draw_ways
from deploy.plan.allot import allot, copies
from deploy.plan.core_plan import plan_cores
from deploy.plan.machines import Machines, node_index, share_memory_of_nodes
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.model_facts import ModelFacts, check_model_fits, read_model_facts
from epd_serve.model_support import check_encoder_free, check_encoders_fit
from epd_serve.placement import InstancePlan, check_servable, lower, switchable
from npu_ops.core_grants import CoreOrder
from npu_ops.core_sets import CoreSets
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceProperties, host_memory

DEMO_NAME = "epd-demo"


@dataclass(frozen=True)
class Blueprint:
    """A checked deployment.

    Attributes:
        model: directory or hub name as the stages get it. served_model_name: as clients say it.
        facts: of the model directory; None for a hub name.
        machines: its nodes.
        plans: instances in layout order, their devices by global id.
        cores: per virtual device, on CPU; else None.
        core_orders: what the workers of an instance have to do about cores, where it has a share.
        pooled: the MM Store has its second tier, Mooncake.
        ways: which way features and KV go between the instances.
        sim_profile: of simulated stages, an absolute path or "".
        warnings: one line each, to be shown.
        memory: what each instance gets of its devices, or None where that is unknown or no stage is started.
    """

    config: DeployConfig
    model: str
    served_model_name: str
    facts: ModelFacts | None
    layout: Layout
    machines: Machines
    plans: tuple[InstancePlan, ...]
    cores: CoreSets | None
    stage_args: StageArgs
    pooled: bool = False
    ways: Ways = field(default_factory=Ways)
    sim_profile: str = ""
    warnings: tuple[str, ...] = ()
    core_orders: Mapping[str, CoreOrder] = field(default_factory=dict)
    memory: MemoryPlan | None = None

    @property
    def device(self) -> str:
        return self.machines.kind

    @property
    def inventory(self) -> DeviceInventory:
        """Of all nodes."""
        return self.machines.inventory

    @property
    def properties(self) -> tuple[DeviceProperties, ...]:
        """Of the devices of all nodes, as far as they have been asked."""
        return tuple(one for node in self.machines.nodes for one in node.properties or ())

    @property
    def features_travel(self) -> bool:
        """Encode-only instances exist, hence an arena and events."""
        return any(role.sends_features for role in self.layout.roles)

    @property
    def model_name(self) -> str:
        """What the model is called among machines, which keep its files in different places."""
        if not self.config.model:
            return DEMO_NAME  # whether its files are here, or a simulated stage needs none
        return self.facts.directory.name if self.facts is not None else self.model

    def cores_of(self, plan: InstancePlan) -> tuple[int, ...]:
        if plan.id in self.core_orders:
            return self.core_orders[plan.id].cores
        return self.cores.of(plan.devices) if self.cores is not None else ()

    def at(self, node: str) -> Blueprint:
        """What the agent of one node is told: of that node alone, its devices under the numbers that they have there.

        Where it has no instance now, one is given as a specimen of those that may come. Raises KeyError.
        """
        machine = self.machines.at(node)
        specimen = replace(self.plans[0], devices=machine.inventory.ids[: self.plans[0].tp])
        plans = next((own for one, own in self.machines.split(self.plans) if one is machine), (specimen,))
        return replace(self, machines=Machines((machine,)), plans=plans, cores=None)


def draw(
    config: DeployConfig,
    *,
    stage: OneStage | None = None,
    machines: Machines | None = None,
    devices: Sequence[int] | None = None,
) -> Blueprint:
    """Check the configuration and place its instances.

    Args:
        machines: the nodes; this machine alone if none are given. What they have been asked already is not asked again.
        devices: global ids in the layout's order, at least as many as it has; those that were found, in order, if none
            are named. On CPU they are virtual: on this machine the cores are divided among as many as the highest id
            says.
        stage: what the one instance of the layout stands for, where it is not the monolith that the layout says.

    Raises:
        ConfigError, LayoutError: what is wrong and how to fix it.
    """
    layout = parse(config.layout)
    check_servable(layout)
    model, facts, name = _model(config)
    check_model_fits(facts, layout)
    if config.encoder_free:
        check_encoder_free(facts.architecture if facts is not None else "", layout, installed_vllm(config.engine))
    doubt = check_encoders_fit(facts.architecture, layout) if facts is not None else None
    simulated = config.engine == "sim"
    nodes = machines or Machines.here("cpu" if simulated else config.device)
    inventory = nodes.inventory
    if inventory.kind != "cpu" and not inventory.ids:
        raise ConfigError(f"no {inventory.kind} device found: {inventory.note}; use --device cpu", param="--device")
    plans = lower(layout, devices or _devices(layout, nodes), shared=config.share_devices)
    if config.switchable:
        plans = switchable(plans)
        if not any(plan.both for plan in plans):
            raise ConfigError(f"--switchable: layout {layout} has no P and no D", param="switchable")
    cann, doubts = _look_at(nodes, plans, config)
    used = [device for plan in plans for device in plan.devices]
    cores = nodes.core_sets(used) if inventory.kind == "cpu" and not simulated else None
    divided = plan_cores(config.core_share, plans, inventory.kind, cores, facts)
    plans = divided.plans
    features_travel = any(role.sends_features for role in layout.roles)
    if simulated and (config.mm_store == "mooncake" or config.mooncake_master):
        raise ConfigError("simulated stages keep features in the arena: drop mooncake", param="mm_store")
    pooled, pool_warnings = choose_pool(
        config, inventory.kind, features_travel=features_travel, several=nodes.several and not simulated
    )
    transfer_warnings = check_feature_transfer(config, inventory.kind, plans)
    warnings = [*([doubt] if doubt is not None else []), *pool_warnings, *transfer_warnings, *doubts, *divided.warnings]
    kv_travels = any(plan.role.sends_kv for plan in plans)
    if config.kv_transport == "mooncake" and kv_travels and (why_not := reads_device_memory(inventory.kind)):
        raise ConfigError(f"--kv-transport mooncake: {why_not}; or leave the flag away", param="kv_transport")
    if config.kv_transport == "mooncake" and inventory.kind != "npu":
        warnings += client_warnings(pooled=False, kv_over_tcp=config.mooncake_protocol == "tcp")
    if cores is not None and cores.oversubscribed:
        count = len({(node_index(device), core) for device, some in cores.sets.items() for core in some})
        warnings.append(f"{layout.device_count} virtual devices share {count} CPU cores: expect it to be slow")
    real = len(set(used))
    if real < layout.device_count:
        warnings.append(f"{layout.device_count} devices of {layout} are virtual: they share {real} {inventory.kind}")
    stage_args = parse_stage_args(config.stage_args, plans, encoder_free=config.encoder_free)
    check_alike([plan for plan in plans if plan.both], stage_args)
    if config.first_token == "prefill" and not simulated and (doubt := waits_for_decode(plans, stage_args)):
        warnings.append(doubt)
    ways = draw_ways(config, inventory.kind, plans, cann=cann, node_of=lambda plan: nodes.local(plan.devices)[0])
    if not simulated and ways.apart and (why_not := reads_device_memory(inventory.kind)):
        raise ConfigError(f"{ways.apart[0]} are on two nodes, where KV takes Mooncake: {why_not}", param="kv_transport")
    memory = NO_MEMORY
    if not simulated:
        nodes = nodes.asked()
        memory = share_memory_of_nodes(
            plans,
            facts,
            nodes,
            stage or stage_args,
            shm_mib=partial(_shm, config, features_travel, host_memory()[0]),
            slab_bytes=config.slab_bytes,
        )
    warnings += memory.warnings
    return Blueprint(
        config=config,
        model=model,
        served_model_name=config.served_model_name or name,
        facts=facts,
        layout=layout,
        machines=nodes,
        plans=memory.shared(plans),
        cores=cores,
        stage_args=stage_args,
        pooled=pooled,
        ways=ways,
        sim_profile=checked_profile(config.engine, config.sim_profile),
        warnings=tuple(warnings),
        core_orders=divided.orders,
        memory=memory.plan,
    )


def _devices(layout: Layout, machines: Machines) -> tuple[int, ...]:
    """Those that were found, or where there are several nodes such that each group is on one of them."""
    inventory = machines.inventory
    if not machines.several:
        return inventory.allot(layout.device_count)
    found = allot(copies(layout), inventory.ids)
    if not all(found):
        there = ", ".join(f"{short_node(node.id)}: {len(node.inventory.ids)}" for node in machines.nodes)
        raise ConfigError(
            f"layout {layout} needs {layout.device_count} devices, those of an instance on one node; there are {there}",
            param="--layout",
        )
    return tuple(device for devices in found for device in devices)


def _look_at(
    machines: Machines, plans: Sequence[InstancePlan], config: DeployConfig
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Numbers of CANN's version, and what is wrong with the nodes, as they say themselves or as is seen of this one."""
    first = machines.nodes[0]
    if first.doubts is None:
        ascend, doubts = preflight(machines.kind, plans, environment(), refuse=config.start_checks == "refuse")
        return numbers(ascend.cann), doubts
    return first.cann, tuple(
        f"node {short_node(node.id)}: {doubt}" for node in machines.nodes for doubt in node.doubts or ()
    )


def _shm(config: DeployConfig, features_travel: bool, host_bytes: int, plans: Sequence[InstancePlan]) -> int:
    """MiB of shared memory that the instances of a node with so much memory want, at most."""
    links = sum(one.sends_kv and other.takes_kv and one is not other for one in plans for other in plans)
    featured = features_travel and any(one.role.sends_features or one.role.takes_features for one in plans)
    encoders = sum(one.role.sends_features for one in plans)
    arena_mib = config.arena_mib or usual_arena_mib(host_bytes, encoders)
    return featured * arena_mib + links * config.kv_staging_mib


def _model(config: DeployConfig) -> tuple[str, ModelFacts | None, str]:
    """The model to serve, its facts and its default name."""
    if config.model:
        facts = read_model_facts(config.model)
        if facts is None:
            return config.model, None, config.model
        return str(facts.directory), facts, facts.directory.name
    if config.engine == "sim":
        return DEMO_NAME, None, DEMO_NAME  # a name is all they need of a model
    from epd_serve.demo.presets import builtin_model_dir

    facts = read_model_facts(str(Path(builtin_model_dir())))
    assert facts is not None
    return str(facts.directory), facts, DEMO_NAME
