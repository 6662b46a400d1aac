"""What a node process is told at its start: all that it ever has to know of its deployment."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.agent.second_tier import MasterCommand, mooncake_command
from deploy.agent.waits import Patience
from deploy.node.front import FrontSetup
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from epd_serve import __version__
from epd_serve.errors import ConfigError
from epd_serve.stage_plan import StageCommand, StagePlan


@dataclass(frozen=True)
class NodeSetup:
    """Of one node.

    Attributes:
        deployment, node: its names; together they are what it is found by.
        host: numeric address at which its stages are reached by the other nodes.
        key: of the deployment, which its members alone have.
        blueprint: of this node alone, under its own device ids; the layout in it is nobody's order.
        ports: from which its instances have theirs; an empty one: any that are free.
        master: `host:port` of the second tier's master, where another node has it.
        front: None where there are to be no front doors.
        owner_pid: of the process with whose end it ends; 0: none.
        shm_mib: how much of /dev/shm is its own; None: whatever is free.
        run_root: of its run directory; "": the usual one.
        command_of, master_command_of: make the commands of stages and of Mooncake's master; tests put stand-ins here.
    """

    deployment: str
    node: str
    host: str
    key: str = field(repr=False)
    blueprint: Blueprint
    ports: range = range(0)
    master: str = ""
    front: FrontSetup | None = None
    owner_pid: int = 0
    shm_mib: int | None = None
    run_root: str = ""
    patience: Patience = field(default_factory=Patience)
    command_of: Callable[[StagePlan], StageCommand] = command_of
    master_command_of: MasterCommand = mooncake_command

    def packed(self) -> bytes:
        """For a process of the same version of this program."""
        return __version__.encode() + b"\n" + pickle.dumps(self)

    @classmethod
    def unpacked(cls, raw: bytes) -> NodeSetup:
        """Raises ConfigError: another version has packed it."""
        version, _, packed = raw.partition(b"\n")
        if version.decode("ascii", "replace") != __version__:
            raise ConfigError(
                f"this node has epd-serve {__version__}, whoever starts it {version.decode('ascii', 'replace')[:40]}: "
                "install the same version on all nodes"
            )
        setup = pickle.loads(packed)
        assert isinstance(setup, cls), "whoever packs it is the same program"
        return setup
