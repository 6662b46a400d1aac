"""The MM Store's second tier in the life of a launch: a Mooncake master of its own, one that is given, or none.

Leaves the segments and the clients to the stages; leaves a fresh master's supervision to `pool_master.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from deploy.agent.pool_master import PATIENCE, MasterNews, PoolMaster, mooncake_command, plan_master
from deploy.agent.record import Record
from deploy.agent.stage_life import executed
from deploy.agent.supervisor import Supervisor
from deploy.agent.wiring import Net
from deploy.host.children import Child, Children
from deploy.host.ports import PortBlocks
from deploy.host.rundir import RunDir
from deploy.host.state import State
from deploy.options.addresses import host_and_port
from deploy.options.mooncake import MASTER_PROGRAM, choose_pool
from deploy.plan.blueprint import Blueprint
from epd_serve.errors import ConfigError, StageError
from store.mooncake.master import MasterSettings

CONNECT_S = 2.0
POOL_FILE = "pool.json"
"""In the run directory, for `epd-serve store`: addresses of the master."""


class SecondTier:
    """What a launch has of it, or would have once features travel. Use as `async with tier.running():`.

    Args:
        children: starts our master. state: has the record of its lives, if an agent before this one has begun it.
        tell: takes a line for the operator.
        master: to be run by us, or None.
        address: `host:port` of the master, ours or a given one; "" where there is no second tier.
    """

    def __init__(
        self,
        run: RunDir,
        children: Children,
        state: State,
        tell: Callable[[str], None],
        master: PoolMaster | None = None,
        address: str = "",
    ) -> None:
        self.address = address
        self._run = run
        self._children = children
        self._state = state
        self._tell = tell
        self._master = master
        self._begun = False
        self._turn = asyncio.Lock()
        self._record: Record | None = None
        self._supervisor: Supervisor | None = None
        if master is not None:  # its ports are nobody else's until it begins, nor between two of its lives
            self._ports = PortBlocks(master.settings.host)
            for port in (master.settings.rpc_port, master.settings.metrics_port):
                self._ports.adopt(port, 1)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """It is there inside the `with`, and our master has gone after it. One that is given may still come later.

        Raises:
            StageError: as of `begin`.
        """
        try:
            await self.begin()
            yield
        finally:
            await self.close()

    async def begin(self) -> None:
        """It is there, before the first instance that has to do with features. Any number of calls.

        Raises:
            StageError: our master does not start, or listens elsewhere.
        """
        async with self._turn:
            if self._begun:
                return
            if self._master is None:
                await self._look_for_given()
            else:
                if self._supervisor is None:
                    self._supervise(self._master, Record(), None)
                await self._answered()
                _record_pool(self._run, self.address, self._master.metrics)
            self._begun = True

    def adopt(self) -> None:
        """Go on with the master that somebody before us has begun, if any."""
        noted = msgspec.msgpack.decode(self._state.read(MASTER_PROGRAM) or b"\xc0", type=Record | None)
        if noted is not None and not noted.over:
            assert self._master is not None, "the plan of a launch does not change"
            process = self._children.adopt(noted.pid, noted.born_ticks) if noted.pid else None
            self._supervise(self._master, noted, process)

    async def close(self) -> None:
        """End our master."""
        if self._supervisor is not None:
            await self._supervisor.close()
        self._supervisor = self._record = None
        self._begun = False
        self._changed()

    @property
    def pid(self) -> int:
        """Of our master; 0 while none runs."""
        return self._record.pid if self._record is not None else 0

    def _changed(self) -> None:
        self._state.write(MASTER_PROGRAM, msgspec.msgpack.encode(self._record))

    def _supervise(self, master: PoolMaster, record: Record, process: Child | None) -> None:
        news = MasterNews(master, self._tell, record.ever_up, self._changed)
        self._supervisor = Supervisor(news, PATIENCE, start=executed(self._children))
        self._record = record
        self._supervisor.add(master.spec(self._children.root), record, process)
        self._changed()

    async def _answered(self) -> None:
        assert self._supervisor is not None
        try:
            await self._supervisor.answered(MASTER_PROGRAM)
        except StageError as error:
            await self.close()  # the next one who needs it tries again
            raise StageError(f"{error}; its log: {self._run.keep_log(MASTER_PROGRAM)}", stage=error.stage) from None

    async def _look_for_given(self) -> None:
        if not self.address:
            return
        _record_pool(self._run, self.address, "")
        if not await _connects(*host_and_port(self.address)):
            self._tell(
                f"warning: no {MASTER_PROGRAM} answers at {self.address}; until one does, features stay on their host"
            )


def planned_tier(
    blueprint: Blueprint,
    run: RunDir,
    net: Net,
    command: Callable[[MasterSettings], tuple[str, ...]] = mooncake_command,
) -> tuple[PoolMaster | None, str]:
    """The master to run, where it is ours, and the address of the one there is: as the blueprint wants it, or would
    want it with encoders; a master of ours gets free ports of `net`."""
    if not (blueprint.pooled or _would_be(blueprint)):
        return None, ""
    if blueprint.config.mooncake_master:
        return None, blueprint.config.mooncake_master
    master = plan_master(run, net, command)
    return master, master.address


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


async def _connects(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError):  # refused, unknown, too long for a name, or a TimeoutError
        return False
    writer.close()
    return True
