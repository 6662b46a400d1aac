"""What all lives of an agent have in common: decided once, before the first of them, and never again.

How much memory was free before anything of the launch ran cannot be found out later, and a master's ports stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.agent.second_tier import MasterCommand, PlannedTier, mooncake_command, planned_tier
from deploy.agent.waits import Patience
from deploy.agent.wiring import Net, Site
from deploy.host.environment import shm_root
from deploy.host.rundir import RunDir
from deploy.memory.shared_memory import RESERVE_MIB, SharedMemory, fit_shared_memory, free_mib, usual_arena_mib
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.runtime.protocol import HOST_MEMORY, SHARED_MEMORY, Node, device_memory
from epd_serve.errors import ConfigError
from epd_serve.stage_plan import StageCommand, StagePlan
from npu_ops.properties import host_memory


@dataclass(frozen=True)
class AgentSetup:
    """Of one launch.

    Attributes:
        blueprint: its model, options and devices are those of all instances, its layout is not.
        memory: sizes of the arena and of the staging buffer of each KV link.
        room: bytes by resource that instances may take together.
        tier: the feature store's second one.
        command_of: makes a stage's command; tests put a stand-in for vLLM here.
        patience: the supervisor's waits.
        net: where this node is, for those of others.
    """

    run: RunDir
    blueprint: Blueprint
    memory: SharedMemory
    room: Mapping[str, int]
    tier: PlannedTier
    command_of: Callable[[StagePlan], StageCommand] = command_of
    patience: Patience = field(default_factory=Patience)
    net: Net = field(default_factory=Net)

    @classmethod
    def of(
        cls,
        run: RunDir,
        blueprint: Blueprint,
        command_of: Callable[[StagePlan], StageCommand] = command_of,
        master_command_of: MasterCommand = mooncake_command,
        patience: Patience | None = None,
        net: Net = Net(),
        shm_mib: int | None = None,
    ) -> AgentSetup:
        """Before anything of it runs.

        Args:
            shm_mib: how much of /dev/shm it may take, where that is not all that is free.

        Raises:
            ConfigError: no room in /dev/shm, no free ports, or a folder for traces that cannot be made.
        """
        config = blueprint.config
        shm_mib = free_mib(shm_root()) if shm_mib is None else shm_mib
        encoders = sum(plan.role.sends_features for plan in blueprint.plans)
        usual_mib = usual_arena_mib(host_memory()[0], encoders, shm_mib)
        memory = fit_shared_memory(
            SharedMemory(config.arena_mib or usual_mib, config.kv_staging_mib),
            blueprint.plans,
            features_travel=blueprint.features_travel,
            free=shm_mib,
        )
        if config.trace_dir:
            try:
                Path(config.trace_dir).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--trace-dir {config.trace_dir} cannot be made: {error.strerror}", param="--trace-dir"
                ) from error
        tier = planned_tier(blueprint, net, master_command_of)
        waits = replace(patience or Patience(), start_s=config.startup_timeout_s)
        return cls(run, blueprint, memory, _room(blueprint, shm_mib), tier, command_of, waits, net)

    @property
    def arena_bytes(self) -> int:
        """Of the arena, once there is one."""
        return self.memory.arena_mib << 20

    @property
    def staging_bytes(self) -> int:
        """Of each KV link."""
        return self.memory.staging_mib << 20

    @property
    def site(self) -> Site:
        """What is wired the same in all instances."""
        return Site(self.run, self.staging_bytes, self.tier.address, self.net)

    def node(self) -> Node:
        """This machine."""
        inventory = self.blueprint.inventory
        return Node(
            self.net.node,
            inventory.kind,
            inventory.ids,
            self.room,
            arena_bytes=self.arena_bytes,
            staging_bytes=self.staging_bytes,
        )


def _room(blueprint: Blueprint, shm_mib: int) -> Mapping[str, int]:
    """Bytes by resource that instances may take together, from what is there before any of them runs.

    What nobody tells the size of is left out: the engine will find out. Of a device it is what was free, for others may
    be on it. Of the host it is all: what is free there changes by the second, and the page cache gives way.
    """
    room = {SHARED_MEMORY: (shm_mib - RESERVE_MIB) << 20}
    for one in blueprint.properties:
        if one.total_bytes is None:
            continue
        if blueprint.device == "cpu":
            room[HOST_MEMORY] = one.total_bytes
        else:
            room[device_memory(one.index)] = one.total_bytes if one.free_bytes is None else one.free_bytes
    return room
