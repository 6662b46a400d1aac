"""The launch's own `mooncake_master`: its command, its ports, and what the operator is told about its lives.

Watched by a supervisor of its own, as stages are: restarted with back-off on the same ports, ended with the launch,
and recorded for the reaper. A restart loses the index and with it every feature of the second tier: it is a cache.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from deploy.agent.stage_life import Spawn
from deploy.agent.supervisor import StageSpec
from deploy.agent.waits import Patience
from deploy.agent.wiring import Net
from deploy.host.environment import stage_environment
from deploy.host.listeners import listeners
from deploy.host.ports import free_ports
from deploy.host.processes import group_members
from deploy.host.rundir import RunDir
from deploy.options.mooncake import MASTER_PROGRAM, master_program
from epd_serve.errors import ConfigError, StageError
from store.addresses import authority
from store.mooncake.master import MasterSettings, master_command, rpc_address

PATIENCE = Patience(
    start_s=15.0,
    poll_s=0.05,
    backoff_s=0.5,
    backoff_max_s=10.0,
    health_every_s=0.5,
    health_timeout_s=2.0,
    hung_s=10.0,
    stop_grace_s=2.0,
)
"""A master starts within half a second and answers at once, so silence means more than it does of a stage."""


@dataclass(frozen=True)
class PoolMaster:
    """The master of one launch.

    Attributes:
        command: its argv; tests put a stand-in here.
    """

    settings: MasterSettings
    run: RunDir
    command: Callable[[MasterSettings], tuple[str, ...]]

    @property
    def address(self) -> str:
        return rpc_address(self.settings)

    @property
    def metrics(self) -> str:
        """Base URL of its HTTP port."""
        return f"http://{authority(self.settings.host, self.settings.metrics_port)}"

    def spec(self, root: int) -> StageSpec:
        """`root`: pid of the process that it dies with."""
        log = self.run.log(MASTER_PROGRAM)

        def command(incarnation: str) -> Spawn:
            return Spawn(self.command(self.settings), stage_environment({}, self.run.path, "cpu", root))

        return StageSpec(MASTER_PROGRAM, self.metrics, log, command, what="the")


def mooncake_command(settings: MasterSettings) -> tuple[str, ...]:
    """argv of the installed master.

    Raises:
        ConfigError: it is not installed (any more).
    """
    program = master_program()
    if program is None:
        raise ConfigError(f"{MASTER_PROGRAM} is not on PATH", param="--mm-store")
    quiet = "--enable_metric_reporting=false"  # else 3 kB of log every 10 s; /metrics says the same
    return (*master_command(settings, str(program)), quiet)


def plan_master(
    run: RunDir, net: Net, command: Callable[[MasterSettings], tuple[str, ...]] = mooncake_command
) -> PoolMaster:
    """A master with free ports of its own."""
    rpc_port, metrics_port = free_ports(2, net.host, net.ports)
    return PoolMaster(MasterSettings(host=net.host, rpc_port=rpc_port, metrics_port=metrics_port), run, command)


def misbound(pid: int, host: str) -> str:
    """What is wrong with the addresses a master listens on, "" when nothing is: it takes the one it is given."""
    given = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    members = [member.pid for member in group_members(pid)]
    wrong = [one for one in listeners(members) if one.address != given]
    return ", ".join(f"{one.address}:{one.port}" for one in wrong)


class MasterNews:
    """Supervisor events of a master: recorded for the reaper, told in one line each.

    A first master that listens on another address than it was given serves nobody: nothing guards its ports.

    Args:
        was_up: one has answered before. changed: called when its record has changed.
    """

    def __init__(
        self, master: PoolMaster, tell: Callable[[str], None], was_up: bool, changed: Callable[[], None]
    ) -> None:
        self._master = master
        self._tell = tell
        self._pid = 0
        self._was_up = was_up
        self._changed = changed

    def before_spawn(self, stage: str, incarnation: str) -> None:
        """Nothing of a previous life lies around."""

    def spawned(self, stage: str, pid: int) -> None:
        self._pid = pid
        self._master.run.record_group(stage, pid)
        self._changed()

    def phase(self, stage: str, phase: str) -> None:
        """It has none worth telling."""

    def up(self, stage: str, incarnation: str, seconds: float) -> None:
        if self._was_up:
            self._tell(f"{stage} is back; features of the second tier were lost and are made again when needed")
        elif wrong := misbound(self._pid, self._master.settings.host):
            raise StageError(f"{stage} listens on {wrong}, not on {self._master.settings.host} alone", stage=stage)
        self._was_up = True
        self._changed()

    def down(self, stage: str, incarnation: str, reason: str, retry_in_s: float | None) -> None:
        if retry_in_s is not None:
            reason = reason.partition("; its log ends with: ")[0]  # its last line tells nothing about a kill
            self._tell(f"{stage} is down: {reason}; features stay on their host; restart in {retry_in_s:g} s")
        self._changed()

    def over(self, stage: str, reason: str) -> None:
        """Whoever waits for its first answer is told."""
        self._changed()
