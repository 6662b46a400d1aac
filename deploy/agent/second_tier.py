"""The MM Store's second tier in the life of a launch: a Mooncake master of its own, one that is given, or none.

Leaves the segments and the clients to the stages; leaves a fresh master's supervision to `pool_master.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from deploy.agent.pool_master import PATIENCE, MasterNews, PoolMaster, mooncake_command, plan_master
from deploy.agent.supervisor import Supervisor
from deploy.host.rundir import RunDir
from deploy.options.config import host_and_port
from deploy.options.mm_store import MASTER_PROGRAM, choose_pool
from deploy.plan.blueprint import Blueprint
from epd_serve.errors import ConfigError, StageError
from store.mooncake.master import MasterSettings

CONNECT_S = 2.0
POOL_FILE = "pool.json"
"""In the run directory, for `epd-serve store`: addresses of the master."""


class SecondTier:
    """What a launch has of it, or would have once features travel. Use as `async with tier.running(tell):`.

    Args:
        master: to be run by us, or None.
        address: `host:port` of the master, ours or a given one; "" where there is no second tier.
        at_once: features travel from the start; else it begins when somebody calls `begin`.
    """

    def __init__(
        self, run: RunDir, master: PoolMaster | None = None, address: str = "", *, at_once: bool = True
    ) -> None:
        self.run = run
        self.master = master
        self.address = address
        self._at_once = at_once
        self._begun = False
        self._turn = asyncio.Lock()
        self._tell: Callable[[str], None] = _to_nobody
        self._supervisor: Supervisor | None = None

    @classmethod
    def of(
        cls,
        blueprint: Blueprint,
        run: RunDir,
        host: str,
        command: Callable[[MasterSettings], tuple[str, ...]] = mooncake_command,
    ) -> SecondTier:
        """As the blueprint wants it, or would want it with encoders; a master of ours gets free ports on `host`."""
        if not (blueprint.pooled or _would_be(blueprint)):
            return cls(run)
        if blueprint.config.mooncake_master:
            return cls(run, address=blueprint.config.mooncake_master, at_once=blueprint.pooled)
        master = plan_master(run, host, command)
        return cls(run, master, master.address, at_once=blueprint.pooled)

    @contextlib.asynccontextmanager
    async def running(self, tell: Callable[[str], None]) -> AsyncIterator[Supervisor | None]:
        """Our master answers inside the `with`, where it is needed at once, and has gone after it. One that is given
        may still come later.

        Raises:
            StageError: as of `begin`.
        """
        self._tell = tell
        if self.master is not None:
            self._supervisor = Supervisor(MasterNews(self.master, tell), PATIENCE)
        try:
            if self._at_once:
                await self.begin()
            yield self._supervisor
        finally:
            if self._supervisor is not None:
                await self._supervisor.close()

    async def begin(self) -> None:
        """It is there, before the first instance that has to do with features. Any number of calls.

        Raises:
            StageError: our master does not start, or listens elsewhere.
        """
        async with self._turn:
            if self._begun:
                return
            if self.master is None or self._supervisor is None:
                await self._look_for_given(self._tell)
            else:
                self._supervisor.add(self.master.spec())
                await self._answered(self._supervisor)
                record_pool(self.run, self.address, self.master.metrics)
            self._begun = True

    async def _answered(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.answered(MASTER_PROGRAM)
        except StageError as error:
            raise StageError(f"{error}; its log: {self.run.keep_log(MASTER_PROGRAM)}", stage=error.stage) from None

    async def _look_for_given(self, tell: Callable[[str], None]) -> None:
        if not self.address:
            return
        record_pool(self.run, self.address, "")
        if not await _connects(*host_and_port(self.address)):
            tell(f"warning: no {MASTER_PROGRAM} answers at {self.address}; until one does, features stay on their host")


def record_pool(run: RunDir, master: str, metrics: str) -> None:
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


def _to_nobody(line: str) -> None:
    """Before it runs there is nothing to tell."""


async def _connects(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError):  # refused, unknown, too long for a name, or a TimeoutError
        return False
    writer.close()
    return True
