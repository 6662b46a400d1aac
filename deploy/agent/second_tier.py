"""The MM Store's second tier in the life of a launch: a Mooncake master of its own, one that is given, or none.

Our own `mooncake_master` is kept by a supervisor, as stages are: restarted with back-off on the same ports, ended with
the launch, and recorded for whoever cleans up. A restart loses the index and with it every feature of the second tier:
it is a cache. Segments and clients are the stages' business.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deploy.agent.stage_life import Record, Spawn, executed
from deploy.agent.supervisor import StageEvents, StageSpec, Supervisor
from deploy.agent.waits import Patience
from deploy.agent.wiring import Net
from deploy.host.children import Children
from deploy.host.environment import stage_environment
from deploy.host.ports import PortBlocks, answers, listeners
from deploy.host.processes import group_members
from deploy.host.rundir import RunDir
from deploy.host.state import State
from deploy.options.addresses import host_and_port
from deploy.options.mooncake import MASTER_PROGRAM, choose_pool, master_program
from deploy.plan.blueprint import Blueprint
from epd_serve.errors import ConfigError, StageError
from store.addresses import authority
from store.mooncake.master import MasterSettings, master_command, rpc_address

CONNECT_S = 2.0
POOL_FILE = "pool.json"
"""In the run directory, for `epd-serve store`: addresses of the master."""

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

MasterCommand = Callable[[MasterSettings], tuple[str, ...]]
"""Makes the argv of a master; tests put a stand-in here."""


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


@dataclass(frozen=True)
class PlannedTier:
    """What a launch has of it, or would have once features travel.

    Attributes:
        address: `host:port` of the master, ours or a given one; "" where there is no second tier.
        master: of ours, or None. command: makes its argv.
        ports: holds its ports: they are nobody else's while it does not listen there, in whichever life of an agent.
    """

    address: str = ""
    master: MasterSettings | None = None
    command: MasterCommand = mooncake_command
    ports: PortBlocks | None = field(default=None, compare=False, repr=False)

    @property
    def metrics(self) -> str:
        """Base URL of our master's HTTP port."""
        assert self.master is not None
        return f"http://{authority(self.master.host, self.master.metrics_port)}"


def planned_tier(blueprint: Blueprint, net: Net, command: MasterCommand = mooncake_command) -> PlannedTier:
    """As the blueprint wants it, or would want it with encoders; a master of ours gets free ports of `net`."""
    if not (blueprint.pooled or _would_be(blueprint)):
        return PlannedTier()
    if blueprint.config.mooncake_master:
        return PlannedTier(blueprint.config.mooncake_master)
    ports = PortBlocks(net.host, net.ports)
    rpc_port = ports.take(2)
    master = MasterSettings(host=net.host, rpc_port=rpc_port, metrics_port=rpc_port + 1)
    return PlannedTier(rpc_address(master), master, command, ports)


class SecondTier(StageEvents):
    """Args:
    children: starts our master. state: has the record of its lives, if an agent before this one has begun it.
    tell: takes a line for the operator.
    """

    def __init__(
        self, run: RunDir, planned: PlannedTier, children: Children, state: State, tell: Callable[[str], None]
    ) -> None:
        self._run = run
        self._planned = planned
        self._children = children
        self._state = state
        self._tell = tell
        self._begun = False
        self._turn = asyncio.Lock()
        self._record: Record | None = None
        self._supervisor = Supervisor(self, PATIENCE, start=executed(children))

    @property
    def pid(self) -> int:
        """Of our master; 0 while none runs."""
        return self._record.pid if self._record is not None else 0

    async def begin(self) -> None:
        """It is there, before the first instance that has to do with features. Any number of calls.

        Raises:
            StageError: our master does not start, or listens elsewhere.
        """
        async with self._turn:
            if self._begun:
                return
            if self._planned.master is None:
                await self._look_for_given()
            else:
                if self._record is None:
                    self._supervise(Record())
                await self._answered()
                _record_pool(self._run, self._planned.address, self._planned.metrics)
            self._begun = True

    def adopt(self) -> None:
        """Go on with the master that somebody before us has begun, if any."""
        noted = msgspec.msgpack.decode(self._state.read(MASTER_PROGRAM) or b"\xc0", type=Record | None)
        if noted is not None and not noted.over:
            self._supervise(noted)

    async def close(self) -> None:
        """End our master."""
        await self._supervisor.close()
        self._record, self._begun = None, False
        self.note()

    def _supervise(self, record: Record) -> None:
        self._record = record
        process = self._children.adopt(record.pid, record.born_ticks) if record.pid else None
        log = self._run.log(MASTER_PROGRAM)
        self._supervisor.add(
            StageSpec(MASTER_PROGRAM, self._planned.metrics, log, self._command, what="the"), record, process
        )
        self.note()

    def _command(self) -> Spawn:
        assert self._planned.master is not None, "it is ours"
        env = stage_environment({}, self._run.path, "cpu", self._children.root)
        return Spawn(self._planned.command(self._planned.master), env)

    async def _answered(self) -> None:
        try:
            await self._supervisor.answered(MASTER_PROGRAM)
        except StageError as error:
            await self.close()  # the next one who needs it tries again
            raise StageError(f"{error}; its log: {self._run.keep_log(MASTER_PROGRAM)}", stage=error.stage) from None

    async def _look_for_given(self) -> None:
        if not (address := self._planned.address):
            return
        _record_pool(self._run, address, "")
        if not await answers(*host_and_port(address), CONNECT_S):
            self._tell(
                f"warning: no {MASTER_PROGRAM} answers at {address}; until one does, features stay on their host"
            )

    # --- what the supervisor says ---------------------------------------------------------------------------------

    def note(self) -> None:
        self._state.write(MASTER_PROGRAM, msgspec.msgpack.encode(self._record))

    def spawned(self, stage: str, pid: int) -> None:
        self._run.record_group(stage, pid)

    def up(self, stage: str) -> None:
        """A first master that listens on another address than it was given serves nobody: nothing guards its ports.

        Raises:
            StageError: it does.
        """
        assert self._record is not None and self._planned.master is not None, "it is ours, and has answered"
        if self._record.lives > 1:
            self._tell(f"{stage} is back; features of the second tier were lost and are made again when needed")
        elif wrong := misbound(self._record.pid, self._planned.master.host):
            raise StageError(f"{stage} listens on {wrong}, not on {self._planned.master.host} alone", stage=stage)

    def down(self, stage: str, reason: str, retry_in_s: float | None) -> None:
        if retry_in_s is not None:
            reason = reason.partition("; its log ends with: ")[0]  # its last line tells nothing about a kill
            self._tell(f"{stage} is down: {reason}; features stay on their host; restart in {retry_in_s:g} s")


def misbound(pid: int, host: str) -> str:
    """What is wrong with the addresses a master listens on, "" when nothing is: it takes the one it is given."""
    given = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    members = [member.pid for member in group_members(pid)]
    wrong = [one for one in listeners(members) if one.address != given]
    return ", ".join(f"{one.address}:{one.port}" for one in wrong)


def _record_pool(run: RunDir, master: str, metrics: str) -> None:
    """Leave the addresses where `epd-serve store` finds them; `metrics` is a base URL, or "" when it is not known."""
    unnamed = run.path / f".{POOL_FILE}"
    unnamed.write_text(json.dumps({"master": master, "metrics": metrics}), encoding="ascii")
    unnamed.rename(run.path / POOL_FILE)


def recorded_pool(run_path: Path) -> tuple[str, str]:
    """Master and metrics address of a launch, empty where it has no second tier."""
    try:
        found = json.loads((run_path / POOL_FILE).read_text(encoding="ascii"))
        return str(found["master"]), str(found["metrics"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def _would_be(blueprint: Blueprint) -> bool:
    """Whether it had a second tier if its layout had encoders. Where Mooncake is asked for and is not there, such a
    layout is refused when it is asked for."""
    try:
        return choose_pool(blueprint.config, blueprint.device, features_travel=True)[0]
    except ConfigError:
        return False
