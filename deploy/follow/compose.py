"""From the settings of a launch to its follower."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from deploy.control.controller import Controller
from deploy.control.reconciler import Reconciler
from deploy.follow.live import Follower, Look
from deploy.follow.observe import Observer
from deploy.follow.plans import Plans
from deploy.follow.report import FollowMetrics
from deploy.follow.types import Limits
from deploy.options.config import group_counts
from deploy.plan.blueprint import Blueprint
from deploy.planner.profile import DeviceProfile, read_device_profile
from epd_serve.sim.profile import read_object
from npu_ops.core_grants import why_fixed
from proxy.registry.table import InstanceTable


def follower_of(
    blueprint: Blueprint,
    controller: Controller,
    reconciler: Reconciler,
    table: InstanceTable,
    look: Look,
    registry: CollectorRegistry,
) -> Follower:
    """Raises ConfigError: the profile cannot be read, or is none of devices."""
    config = blueprint.config
    profile = _profile(config.follow_profile, config.sim_profile)
    limits = Limits(
        devices=config.follow_devices or _devices(blueprint),
        least=group_counts(config.follow_min, "follow_min"),
        most=group_counts(config.follow_max, "follow_max"),
        use=config.follow_use,
        every_s=config.follow_every_s,
        quiet_s=config.follow_quiet_s,
        switchable=config.switchable,
        fixed_shares=why_fixed(blueprint.device),
    )
    slo, _ = config.slo.objectives()
    observer = Observer(profile, slo.tpot_ms / 1e3)
    plans = None
    if profile is not None and config.follow_relayout == "on" and not config.encoder_free:
        plans = Plans(profile, slo)  # which may want an encoder beside prefill
    follower = Follower(config.follow, limits, observer, controller, reconciler, table, look, plans)
    registry.register(FollowMetrics(follower))
    return follower


def _devices(blueprint: Blueprint) -> int:
    """All that the nodes have; on a CPU, which has as many virtual ones as are wanted, those of the launch."""
    if blueprint.device == "cpu":
        return blueprint.layout.device_count
    return sum(len(node.inventory.ids) for node in blueprint.machines.nodes)


def _profile(own: str, simulated: str) -> DeviceProfile | None:
    """The one for the follower, or that of simulated stages where it is of devices."""
    if own:
        return read_device_profile(Path(own), "--follow-profile")
    if simulated and "stages" in read_object(Path(simulated), f"simulation profile {simulated}", "--sim-profile"):
        return read_device_profile(Path(simulated), "--sim-profile")
    return None
