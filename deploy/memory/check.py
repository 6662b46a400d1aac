"""Refuses a launch whose stages do not fit, or whose device is in use by others, before a model is loaded.

Owns the one call that a blueprint makes (`share_memory`) and what the operator is told. A refusal shows the whole table
and one change that helps (`deploy/memory/fix.py`). Where only estimates say that an instance alone does not fit, or
where the operator set the shares, it is a warning: the engine measures for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.memory.fix import clip_fix, first_fix
from deploy.memory.plan import MemoryPlan, Neighbours, gib, groups_of, memory_table, plan_memory
from deploy.memory.sizing import Sizing
from deploy.options.stage_args import StageArgs
from epd_serve.errors import ConfigError
from epd_serve.memory_shares import Need, divide, fixed_shares
from epd_serve.model_facts import ModelFacts
from epd_serve.placement import InstancePlan
from epd_serve.roles import Role
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceProperties, read_properties

VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}

_STRANGER_BYTES = 64 << 20
"""Processes with less on a device, such as a display server, are nobody's concern."""

_UNEXPLAINED = 0.1  # part of a device that is in use without any process being shown, as in a container


@dataclass(frozen=True)
class OneStage:
    """The stage run alone that a layout of one instance stands for.

    Attributes:
        devices: ids, or empty for those that the layout was placed on. words: its vLLM flags.
    """

    role: Role
    devices: tuple[int, ...]
    words: tuple[str, ...]

    def of(self, plan: InstancePlan) -> tuple[str, ...]:
        """Its flags, whichever instance is asked for."""
        return self.words


@dataclass(frozen=True)
class Outcome:
    """What was decided.

    Attributes:
        grants: share of each device and bytes of KV cache, by instance; those that are not here are not told any.
        plan: None where the model or the devices do not tell their sizes.
    """

    grants: Mapping[str, tuple[float | None, int | None]] = field(default_factory=dict)
    plan: MemoryPlan | None = None
    warnings: tuple[str, ...] = ()

    def shared(self, plans: Sequence[InstancePlan]) -> tuple[InstancePlan, ...]:
        """The instances with what they get."""
        got = [(plan, *self.grants.get(plan.id, (None, None))) for plan in plans]
        return tuple(replace(plan, memory_share=share, kv_cache_bytes=kv) for plan, share, kv in got)


NO_MEMORY = Outcome()


def share_memory(
    plans: Sequence[InstancePlan],
    facts: ModelFacts | None,
    inventory: DeviceInventory,
    words: StageArgs | OneStage,
    *,
    shm_mib: int = 0,
    slab_bytes: int | None = 0,
    properties: Sequence[DeviceProperties] | None = None,
) -> Outcome:
    """Shares for all instances.

    Args:
        facts: None where the model's files are not here.
        words: vLLM flags of the operator.
        shm_mib: of host memory, for all. slab_bytes: see `Sizing`.
        properties: of the devices; by default they are asked.

    Raises:
        ConfigError: what does not fit, the table, and one change that makes it fit.
    """
    kind = inventory.kind
    if isinstance(words, OneStage):
        (plan,) = plans
        plans = (
            replace(plan, role=words.role, devices=words.devices if kind != "cpu" and words.devices else plan.devices),
        )
    if facts is None:
        return _unknown(plans, kind, "the model is not a folder on this machine")
    found = read_properties(inventory) if properties is None else properties
    sizing = Sizing(facts, inventory, found, words.of, shm_mib << 20, slab_bytes)
    memory = plan_memory(plans, sizing)
    if memory is None:
        return _unknown(plans, kind, _untold(sizing, plans))
    warnings = tuple(warning for group in memory.groups for warning in _check(group, memory, sizing))
    told = {} if kind == "cpu" else {name: (one.share, one.kv_override) for name, one in memory.grants().items()}
    return Outcome(told, memory, warnings)


def _check(group: Neighbours, plan: MemoryPlan, sizing: Sizing) -> list[str]:
    """Warnings. Raises ConfigError."""
    if plan.kind == "cpu":
        return _check_host(group, plan, sizing)
    division, names = group.division, group.names
    where = f"{plan.kind} device {','.join(map(str, group.plans[0].devices))}"
    _check_own_shares(group, where)
    found = [one for one in sizing.properties if one.index in group.plans[0].devices]
    others = ", ".join(dict.fromkeys(stranger for one in found for stranger in _strangers(one)))
    if not division.missing:
        used = f"{where} is used by others too ({others}); the plan keeps to the {gib(division.free)} that are free"
        return [used] * bool(others) + _clips(group, sizing)
    needs = [grant.need for grant in division.grants]
    least = gib(sum(need.least for need in needs))
    if others and not divide(division.total, needs).missing:
        raise ConfigError(
            f"{where} is in use by others ({others}): {names} must have {least}, "
            f"{gib(division.free)} of {gib(division.total)} are free. {_elsewhere(plan, sizing)}\n\n"
            f"{memory_table(plan)}",
            param="--device",
        )
    text = (
        f"{names} do{'es' * (len(needs) == 1)} not fit on {where}"
        + (f", which is in use by others ({others})" if others else "")
        + f": at least {least} must be there, {gib(division.missing)} more than can be planned with"
    )
    measured = len(needs) == 1 or all(need.fixed_share is not None for need in needs)
    if measured and sum(map(_surely, needs)) <= division.free:
        return [f"by estimate {text}; if it does not start: {first_fix(group, sizing)}"]
    raise ConfigError(f"{text}.\n\n{memory_table(plan)}\n\nChange: {first_fix(group, sizing)}", param="--layout")


def _surely(need: Need) -> int:
    """What cannot do with less: estimates are not wrong by half."""
    return need.least - (need.activations + need.runtime) // 2


def _clips(group: Neighbours, sizing: Sizing) -> list[str]:
    """A warning where an encoder has no room for the longest clip that its flags allow."""
    for one, grant in zip(group.plans, group.division.grants, strict=True):
        if grant.longest < grant.need.longest:
            lacks = gib(grant.need.longest - grant.longest)
            return [
                f"{one.id} lacks {lacks} for the longest clip that it can be sent, which would end it; "
                f"{clip_fix(one, group.division.total, sizing)}"
            ]
    return []


def _check_own_shares(group: Neighbours, where: str) -> None:
    """Shares that the operator set, with ours beside them where these can be, have to sum below 1."""
    division = group.division
    fixed = [grant.need.fixed_share or 0.0 for grant in division.grants]
    shares = sum(fixed if division.missing else [grant.share or 0.0 for grant in division.grants])
    if len(fixed) > 1 and any(fixed) and shares >= 1:
        raise ConfigError(
            f"the memory shares of {group.names} on {where} sum to {shares:.2f}; they have to stay below 1: "
            "lower --gpu-memory-utilization in --stage-args, or leave it out",
            param="--stage-args",
        )


def _check_host(group: Neighbours, plan: MemoryPlan, sizing: Sizing) -> list[str]:
    division = group.division
    take = f"{group.names} take {gib(division.taken + group.shared)} of host memory"
    short = [grant.need for grant in division.grants if grant.need.kv_token and grant.kv < grant.need.kv_least]
    if division.missing or short:
        reason = (
            f"{take}, this machine has {gib(division.total)}"
            if division.missing
            else f"{short[0].id} has {gib(short[0].fixed_kv or 0)} of KV cache, and one request of the longest length "
            f"needs {gib(short[0].kv_least)}"
        )
        raise ConfigError(f"{reason}.\n\n{memory_table(plan)}\n\nChange: {first_fix(group, sizing)}", param="--layout")
    if division.taken + group.shared > division.free:
        return [f"{take}, {gib(division.free)} are available now"]
    return []


def _unknown(plans: Sequence[InstancePlan], kind: str, why: str) -> Outcome:
    """Fixed shares for neighbours, said; an instance alone is the engine's own to fit."""
    groups = [group for group in groups_of(plans, kind) if len(group) > 1]
    if kind == "cpu" or not groups:
        return NO_MEMORY
    told: dict[str, tuple[float | None, int | None]] = {}
    for group in groups:
        shares = fixed_shares([plan.role for plan in group])
        told |= {plan.id: (share, None) for plan, share in zip(group, shares, strict=True)}
    warning = f"memory shares of co-located stages are fixed ones, because {why}; --gpu-memory-utilization sets others"
    return Outcome(told, None, (warning,))


def _untold(sizing: Sizing, plans: Sequence[InstancePlan]) -> str:
    for device in dict.fromkeys(device for plan in plans for device in plan.devices):
        if sizing.memory_of(device) is None:
            notes = [one.note for one in sizing.properties if one.index == device and one.note]
            return f"the memory of device {device} is unknown" + (f" ({notes[0]})" if notes else "")
    return f"{sizing.facts.directory.name} does not tell the sizes of its weights or encoders"


def _strangers(found: DeviceProperties) -> list[str]:
    """Processes that hold memory of a device now, as `pid 1234 python (31.0 GiB)`."""
    named = [
        f"pid {user.pid} {Path(user.name).name}" + (f" ({gib(user.bytes)})" if user.bytes else "")
        for user in found.users
        if user.bytes is None or user.bytes >= _STRANGER_BYTES
    ]
    if named or found.total_bytes is None or found.free_bytes is None:
        return named
    used = found.total_bytes - found.free_bytes
    return [f"{gib(used)}, no process is shown"] if used > _UNEXPLAINED * found.total_bytes else []


def _elsewhere(plan: MemoryPlan, sizing: Sizing) -> str:
    """Which devices to choose instead: those with the most free memory, as many as the layout needs."""
    count = len({device for group in plan.groups for one in group.plans for device in one.devices})
    free = {
        one.index: one.free_bytes for one in sizing.properties if one.free_bytes is not None and not _strangers(one)
    }
    variable = VISIBLE[plan.kind]
    if len(free) < count:
        return f"End them, or name devices that are free in {variable}"
    chosen = sorted(sorted(free, key=lambda index: -free[index])[:count])
    return f"End them, or choose devices that are free: {variable}={','.join(map(str, chosen))}"
