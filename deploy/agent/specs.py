"""From a blueprint to what each of its instances is, whatever it is called: two that are equal stand for each other.

Equal is what the command of the stage says, for nothing else reaches it. So what a device does not tell its stages,
as a CPU its neighbours, makes no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deploy.agent.wiring import Site, wire
from deploy.host.rundir import RunDir
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.runtime.protocol import HOST_MEMORY, Order, Spec, device_memory
from epd_serve.placement import InstancePlan
from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring
from npu_ops.core_grants import why_fixed

_NOWHERE = Site(RunDir("", Path(), Path()), staging_bytes=0, mooncake_master="some")


def specs(blueprint: Blueprint) -> tuple[Spec, ...]:
    """Of all its instances, in layout order."""
    return tuple(_spec(blueprint, plan) for plan in blueprint.plans)


def orders(blueprint: Blueprint) -> tuple[Order, ...]:
    """To run it where nothing runs yet, under the names of its layout."""
    return tuple(Order(plan.id, spec) for plan, spec in zip(blueprint.plans, specs(blueprint), strict=True))


def _spec(blueprint: Blueprint, plan: InstancePlan) -> Spec:
    node, devices = blueprint.machines.local(plan.devices)
    spec = Spec(
        role=plan.role,
        devices=devices,
        digest="",
        node=node,
        both=plan.both,
        needs=_needs(blueprint, plan, devices),
        plan=replace(plan, devices=devices),
        stage=_stage(blueprint, plan, devices),
        cores=blueprint.cores_of(plan),
        featured=blueprint.features_travel and (plan.role.sends_features or plan.role.takes_features),
    )
    return replace(spec, digest=_digest(spec))


def _stage(blueprint: Blueprint, plan: InstancePlan, devices: tuple[int, ...]) -> StagePlan:
    """Without what names a life."""
    config = blueprint.config
    return StagePlan(
        instance="",
        role=plan.role,
        device=blueprint.device,
        device_ids=devices,
        cores=blueprint.cores_of(plan),
        tp=plan.tp,
        model=blueprint.model,
        served_model_name=blueprint.served_model_name,
        port=0,
        host="",
        wiring=_policies(blueprint, plan),
        extra_args=blueprint.stage_args.of(plan),
        colocated=1 + len(plan.colocated_with),
        memory_share=plan.memory_share,
        core_order=blueprint.core_orders.get(plan.id),
        kv_cache_bytes=plan.kv_cache_bytes,
        engine=config.engine,
        sim_profile=blueprint.sim_profile,
    )


def _policies(blueprint: Blueprint, plan: InstancePlan) -> StageWiring:
    config, slo = blueprint.config, blueprint.config.slo
    ttft_s, tpot_s = slo.limits_s if slo.named and config.step_budgets == "on" else (0.0, 0.0)
    return StageWiring(
        instance="",
        role=plan.role,
        incarnation="",
        mooncake_segment_bytes=config.mooncake_segment_mib << 20 if plan.role.sends_features else 0,
        takes_slab=config.feature_slab == "on",
        slab_bytes=config.feature_slab_mib << 20,
        feature_transfer=config.feature_transfer,
        feature_prefetch=config.feature_prefetch,
        partial_prefill=config.partial_prefill == "on",
        slo_ttft_s=ttft_s,
        slo_tpot_s=tpot_s,
        recompute_limit=config.recompute_limit,
        kv_transport=config.kv_transport,
        mooncake_protocol="ascend" if blueprint.device == "npu" else config.mooncake_protocol,
        kv_grouping=config.kv_grouping,
        kv_packet_floor_bytes=config.kv_packet_floor_kib << 10,
        kv_faults=config.kv_faults,
        both=plan.both,
        trace_path=str(Path(config.trace_dir).resolve()) if config.trace_dir else "",
        otlp_traces_endpoint=config.otlp_traces_endpoint,
    )


def _digest(spec: Spec) -> str:
    assert spec.stage is not None
    if spec.both:  # which part it starts in says nothing
        spec = replace(spec, role=Role.P)
    stage = wire(Order("", spec), _NOWHERE, port=0, incarnation="")
    cores = stage.core_order
    if cores is not None and not why_fixed(cores.device):  # other cores reach it while it runs
        stage = replace(stage, cores=(0,), core_order=replace(cores, instance="", shares={"": 1.0}, cores=()))
    elif cores is not None:  # names of neighbours say nothing, their order does
        numbered = {str(number): share for number, share in enumerate(cores.shares.values())}
        own = str(list(cores.shares).index(cores.instance))
        stage = replace(stage, core_order=replace(cores, instance=own, shares=numbered))
    command = command_of(stage)
    text = json.dumps([*command.argv, sorted(command.env.items())])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _needs(blueprint: Blueprint, plan: InstancePlan, devices: tuple[int, ...]) -> Mapping[str, int]:
    """Bytes by resource; nothing where the sizes are unknown.

    A layout that was accepted fits on devices where nothing of ours runs: where its estimates say otherwise, because
    what the engine keeps outside its budget is beyond what is free, each is cut by as much.
    """
    if blueprint.memory is None:
        return {}
    divisions = {grant.need.id: group.division for group in blueprint.memory.groups for grant in group.division.grants}
    taken, division = blueprint.memory.grants()[plan.id].taken, divisions[plan.id]
    if blueprint.device == "cpu":
        return {HOST_MEMORY: taken}
    cut = taken * min(division.free, division.taken) // division.taken
    return {device_memory(device): cut for device in devices}
