"""Everything decided before the first process starts: model, layout, devices, flags. Made by `draw`; no side effects.

All that can be wrong with the operator's input is found here, in one line, in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.doctor.preflight import preflight
from deploy.host.environment import environment
from deploy.memory.check import NO_MEMORY, OneStage, share_memory
from deploy.memory.plan import MemoryPlan
from deploy.options.config import DeployConfig
from deploy.options.engines import checked_profile
from deploy.options.mm_store import choose_pool
from deploy.options.mooncake_package import client_warnings, reads_device_memory
from deploy.options.proxy_overrides import proxy_overrides
from deploy.options.stage_args import StageArgs, parse_stage_args
from deploy.options.versions import numbers
from deploy.options.ways import Ways, draw_ways
from deploy.plan.core_plan import plan_cores
from epd_serve.answer_flags import answer_flags
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.model_facts import ModelFacts, check_model_fits, read_model_facts
from epd_serve.model_support import check_encoders_fit
from epd_serve.placement import InstancePlan, check_servable, lower, switchable
from npu_ops.core_grants import CoreOrder
from npu_ops.core_sets import CoreSets, core_sets
from npu_ops.discovery import DeviceInventory, DiscoveryError, discover
from npu_ops.properties import DeviceProperties, read_properties

DEMO_NAME = "epd-demo"


@dataclass(frozen=True)
class Blueprint:
    """A checked deployment.

    Attributes:
        model: directory or hub name as the stages get it. served_model_name: as clients say it.
        facts: of the model directory; None for a hub name.
        plans: instances in layout order.
        cores: per virtual device, on CPU; else None.
        core_orders: what the workers of an instance have to do about cores, where it has a share.
        pooled: the MM Store has its second tier, Mooncake.
        ways: which way features and KV go between the instances.
        sim_profile: of simulated stages, an absolute path or "".
        warnings: one line each, to be shown.
        memory: what each instance gets of its devices, or None where that is unknown or no stage is started.
        properties: of the devices, from before a stage of ours was on them; empty where nobody needed them.
    """

    config: DeployConfig
    model: str
    served_model_name: str
    facts: ModelFacts | None
    layout: Layout
    inventory: DeviceInventory
    plans: tuple[InstancePlan, ...]
    cores: CoreSets | None
    stage_args: StageArgs
    pooled: bool = False
    ways: Ways = field(default_factory=Ways)
    sim_profile: str = ""
    warnings: tuple[str, ...] = ()
    core_orders: Mapping[str, CoreOrder] = field(default_factory=dict)
    memory: MemoryPlan | None = None
    properties: tuple[DeviceProperties, ...] = ()

    @property
    def device(self) -> str:
        return self.inventory.kind

    @property
    def features_travel(self) -> bool:
        """Encode-only instances exist, hence an arena and events."""
        return any(plan.role.sends_features for plan in self.plans)

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


def draw(
    config: DeployConfig,
    *,
    stage: OneStage | None = None,
    starts_stages: bool = True,
    devices: Sequence[int] | None = None,
    properties: Sequence[DeviceProperties] | None = None,
) -> Blueprint:
    """Check the configuration and place its instances.

    Args:
        devices: their devices in the layout's order, at least as many as it has; those that were found, in order, if
            none are named. On CPU they are virtual, and the cores are divided among as many as the highest id says.
        stage: what the one instance of the layout stands for, where it is not the monolith that the layout says.
        starts_stages: False for a head, whose stages are on other machines.
        properties: of the devices, where they are known from before stages of ours were on them; else they are asked.

    Raises:
        ConfigError, LayoutError: what is wrong and how to fix it.
    """
    layout = parse(config.layout)
    check_servable(layout)
    proxy_overrides(config.proxy)
    model, facts, name = _model(config)
    check_model_fits(facts, layout)
    doubt = check_encoders_fit(facts.architecture, layout) if facts is not None else None
    simulated = config.engine == "sim"
    inventory = _devices("cpu" if simulated else config.device)
    if inventory.kind != "cpu" and not inventory.ids:
        raise ConfigError(f"no {inventory.kind} device found: {inventory.note}; use --device cpu", param="--device")
    plans = lower(layout, devices or inventory.allot(layout.device_count), shared=config.share_devices)
    if config.switchable:
        plans = switchable(plans)
        if not any(plan.both for plan in plans):
            raise ConfigError(f"--switchable: layout {layout} has no P and no D", param="switchable")
    ascend, doubts = preflight(inventory.kind, plans, environment(), refuse=config.start_checks == "refuse")
    virtual = max((*(devices or ()), layout.device_count - 1)) + 1
    cores = core_sets(virtual) if inventory.kind == "cpu" and not simulated else None
    divided = plan_cores(config.core_share, plans, inventory.kind, cores, facts)
    plans = divided.plans
    features_travel = any(role.sends_features for role in layout.roles)
    if simulated and (config.mm_store == "mooncake" or config.mooncake_master):
        raise ConfigError("simulated stages keep features in the arena: drop mooncake", param="mm_store")
    pooled, pool_warnings = choose_pool(config, inventory.kind, features_travel=features_travel)
    warnings = [*([doubt] if doubt is not None else []), *pool_warnings, *doubts, *divided.warnings]
    kv_travels = any(plan.role.sends_kv for plan in plans)
    if config.kv_transport == "mooncake" and kv_travels and (why_not := reads_device_memory(inventory.kind)):
        raise ConfigError(f"--kv-transport mooncake: {why_not}; or leave the flag away", param="kv_transport")
    if config.kv_transport == "mooncake" and inventory.kind != "npu":
        warnings += client_warnings(pooled=False, kv_over_tcp=config.mooncake_protocol == "tcp")
    if cores is not None and cores.oversubscribed:
        count = len({core for one in cores.sets for core in one})
        warnings.append(f"{layout.device_count} virtual devices share {count} CPU cores: expect it to be slow")
    real = len({device for plan in plans for device in plan.devices})
    if real < layout.device_count:
        warnings.append(f"{layout.device_count} devices of {layout} are virtual: they share {real} {inventory.kind}")
    stage_args = parse_stage_args(config.stage_args, plans)
    _check_alike([plan for plan in plans if plan.both], stage_args)
    if config.first_token == "prefill" and not simulated and (doubt := _waits_for_decode(plans, stage_args)):
        warnings.append(doubt)
    ways = draw_ways(config, inventory.kind, plans, pooled=pooled, cann=numbers(ascend.cann))
    memory = NO_MEMORY
    if starts_stages and not simulated:
        properties = read_properties(inventory) if properties is None else properties
        memory = share_memory(
            plans,
            facts,
            inventory,
            stage or stage_args,
            feature_path=ways.widest_feature_path,
            shm_mib=_shm(config, plans),
            properties=properties,
        )
    warnings += memory.warnings
    return Blueprint(
        config=config,
        model=model,
        served_model_name=config.served_model_name or name,
        facts=facts,
        layout=layout,
        inventory=inventory,
        plans=memory.shared(plans),
        cores=cores,
        stage_args=stage_args,
        pooled=pooled,
        ways=ways,
        sim_profile=checked_profile(config.engine, config.sim_profile),
        warnings=tuple(warnings),
        core_orders=divided.orders,
        memory=memory.plan,
        properties=tuple(properties or ()),
    )


def _check_alike(plans: Sequence[InstancePlan], stage_args: StageArgs) -> None:
    """Raises ConfigError where instances that take each other's part have flags of their own."""
    for plan in plans[1:]:
        if stage_args.of(plan) != stage_args.of(plans[0]):
            raise ConfigError(
                f"--switchable: {plans[0].id} and {plan.id} are to take each other's part and have different flags; "
                "give P and D the same --stage-args",
                param="stage_args",
            )


def _waits_for_decode(plans: Sequence[InstancePlan], stage_args: StageArgs) -> str:
    """Why no stream can begin with a prefill instance's token, or ""."""
    senders = [answer_flags(stage_args.of(plan)) for plan in plans if plan.sends_kv]
    takers = [answer_flags(stage_args.of(plan)) for plan in plans if plan.takes_kv]
    if not senders or any(flags is not None and flags in takers for flags in senders):
        return ""
    return (
        "streams wait for decode's first token: prefill and decode instances differ in flags that may shape an answer, "
        "or have --speculative-config or --logits-processors"
    )


def _shm(config: DeployConfig, plans: Sequence[InstancePlan]) -> int:
    """MiB of shared memory that a launch wants, at most."""
    links = sum(one.sends_kv and other.takes_kv and one is not other for one in plans for other in plans)
    arena = config.arena_mib if any(one.role.sends_features for one in plans) else 0
    return arena + links * config.kv_staging_mib


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


def _devices(kind: str) -> DeviceInventory:
    try:
        return discover(kind)
    except DiscoveryError as error:
        raise ConfigError(str(error), param="--device") from error
