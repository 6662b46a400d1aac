"""Core shares of one deployment: decided, checked against this machine, and turned into orders for the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd_serve.core_shares import FLAG, neighbours_shares, share_cores
from epd_serve.errors import ConfigError
from epd_serve.model_facts import ModelFacts
from epd_serve.placement import InstancePlan
from epd_serve.stage_work import read_stage_work
from npu_ops.core_grants import CoreOrder
from npu_ops.core_sets import CoreSets, TooFewCoresError
from npu_ops.mps import why_no_mps


@dataclass(frozen=True)
class CorePlan:
    """Plans with their `core_share`, the order of each instance that has one, and what the operator should know."""

    plans: tuple[InstancePlan, ...]
    orders: Mapping[str, CoreOrder] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def plan_cores(
    text: str, plans: Sequence[InstancePlan], device: str, cores: CoreSets | None, facts: ModelFacts | None
) -> CorePlan:
    """Divide devices as `--core-share` says. On an NPU the counts are the workers' to find: only they can ask it.

    Args:
        text: of the option. device: `npu`, `cuda` or `cpu`. cores: of virtual devices; None where stages are simulated.

    Raises:
        ConfigError: as of `share_cores`; too few CPU cores for disjoint sets; simulated stages.
    """
    if not text:
        return CorePlan(tuple(plans))
    if device == "cpu" and cores is None:
        raise ConfigError("simulated stages compute on no cores: drop --core-share", param=FLAG)
    shared = share_cores(text, plans, read_stage_work(facts.directory) if facts is not None else None)
    warnings = []
    if all(plan.core_share is None for plan in shared):
        warnings.append(f"{FLAG} {text} changes nothing: no two stages of this layout share a device")
    why_not = why_no_mps() if device == "cuda" and not warnings else ""
    if why_not:
        warnings.append(
            f"core shares are not enforced, the stages of a GPU take turns instead: {why_not}; "
            "start MPS with nvidia-cuda-mps-control -d"
        )
    orders = {}
    for plan in shared:
        shares = neighbours_shares(plan, shared)
        if shares:
            orders[plan.id] = CoreOrder(device, plan.id, shares, _cores(plan, shares, cores), enforced=not why_not)
    return CorePlan(shared, orders, tuple(warnings))


def _cores(plan: InstancePlan, shares: Mapping[str, float], cores: CoreSets | None) -> tuple[int, ...]:
    if cores is None:
        return ()
    try:
        sets = cores.divided(plan.devices, list(shares.values()))
    except TooFewCoresError as error:
        raise ConfigError(
            f"{FLAG}: {', '.join(shares)} share {len(cores.of(plan.devices))} CPU core(s), and each needs one of its "
            f"own ({error}); drop {FLAG}, give this process more cores, or use a layout with fewer devices",
            param=FLAG,
        ) from error
    return sets[list(shares).index(plan.id)]
