"""The front doors of one node, told everything by whoever controls the deployment.

Whoever looks after them may be killed, as they may: they go on, and the next life finds them by what is written down.
What it was told last is, too, so that a front door that has to be started meanwhile knows of the instances.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from deploy.front.doors import FrontDoors
from deploy.front.shared import Shared
from deploy.host.children import Children
from deploy.host.event_loop import together
from deploy.host.rundir import RunDir
from deploy.host.state import State
from deploy.runtime.node_api import FrontState, FrontStatus, Leases
from epd_serve.errors import EpdError

if TYPE_CHECKING:
    from proxy.config.settings import ProxySettings

STATE, ENDED = "front state", "front ended"
"""Sections of the state: what was told last, and that there are to be no front doors any more."""

RETRY_S = 1.0
GRACE_S = 2.0
"""How long requests in flight may go on when all of them end."""


class _Noted(msgspec.Struct):
    """`paused_until`: of the machine's monotonic clock, seconds."""

    state: FrontState
    paused_until: float

    def now(self) -> FrontState:
        return msgspec.structs.replace(self.state, paused_s=max(0.0, self.paused_until - time.monotonic()))


class NodeFront:
    """Args:
        settings: to begin with. What is the node's own in them it sets itself.
        drain_s: how long requests in flight may go on when one of them ends.
        key_file: of the deployment's key, here.
        say: takes a line for the operator.

    Attributes:
        doors: those of now: others, once these have not started.
    """

    def __init__(
        self,
        settings: ProxySettings,
        drain_s: float,
        run: RunDir,
        shared: Shared,
        key_file: str,
        children: Children,
        state: State,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._drain_s = drain_s
        self._run = run
        self._shared = shared
        self._key_file = key_file
        self._children = children
        self._state = state
        self._say = say
        self._newest = (0, 0)
        self._restart: tuple[str, asyncio.Task[None]] | None = None
        self._end: asyncio.Task[None] | None = None
        self._make()

    def _make(self) -> None:
        self._packed_settings = b""
        self._complete = False
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.doors = FrontDoors(
            self._own(self._settings),
            replace(self._shared, feed=self._shared.feed.dup()),  # each closes its own
            self._children,
            self._state,
            grace_s=GRACE_S,
            drain_s=self._drain_s,
            say=self._say,
            launch_id=self._run.launch_id,
        )

    async def serve(self) -> None:
        """Until cancelled, which leaves the front doors as they are. Where they do not start they are tried again, once
        whoever waits for them has been told."""
        while self._state.read(ENDED) is None:
            try:
                await self._serve_once()
            except EpdError as error:
                self._say(f"front doors: {error}; tried again in {RETRY_S:g} s")
                if not self._started.done():
                    self._started.set_exception(error)
                    self._started.exception()  # nobody may be waiting for it
            await asyncio.sleep(RETRY_S)
            self._make()
        await asyncio.get_running_loop().create_future()

    async def _serve_once(self) -> None:
        """Raises EpdError: one does not start."""
        tasks = [self.doors.serve(), self._until_ready()]
        if (noted := self._state.read(STATE)) is not None:
            # first of all: front doors that are there are told nothing else meanwhile
            tasks.insert(0, self._tell(msgspec.msgpack.decode(noted, type=_Noted).now()))
        await together(*tasks)

    async def _until_ready(self) -> None:
        await self.doors.ready()
        self._started.set_result(None)
        await asyncio.get_running_loop().create_future()  # the front doors decide when this ends

    @property
    def serves(self) -> bool:
        """They have started, and since then there has been a live instance for each role that is wanted."""
        table = self.doors.table
        if not self._complete:
            self._complete = bool(table.live_roles()) and not table.missing()
        return self._complete and self._started.done() and self._started.exception() is None

    # --- what a controller asks -----------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until all of them serve, and know what has been said. Raises EpdError: one does not start."""
        await asyncio.shield(self._started)
        await self.doors.seen()

    async def take_in(self, state: FrontState, epoch: int) -> None:
        """Have them know this, unless they know of something newer: requests may overtake each other."""
        if (epoch, state.number) < self._newest:
            return
        self._newest = (epoch, state.number)
        noted = _Noted(state, time.monotonic() + state.paused_s)
        await self._tell(state)
        if self._newest == (epoch, state.number):
            self._state.write(STATE, msgspec.msgpack.encode(noted))

    async def restart(self, id: str) -> None:
        """Replace them one by one. Who asks again by the same id waits for the same. Raises EpdError."""
        if self._restart is None or self._restart[0] != id:
            self._restart = id, asyncio.create_task(self.doors.restart(), name="restart")
        await asyncio.shield(self._restart[1])

    async def end(self) -> None:
        """All of them, gracefully, and for good."""
        self._state.write(ENDED, b"")
        if self._end is None:
            self._end = asyncio.create_task(self.doors.end(), name="end of front doors")
        await asyncio.shield(self._end)

    def status(self) -> FrontStatus:
        doors = self.doors
        leases = tuple(
            Leases(id, incarnation, {work: tally for work, tally in tallies.items() if tally.acquired})
            for (id, incarnation), tallies in doors.tallies().items()
        )
        return FrontStatus(
            tuple(one for one in leases if one.tallies), dict(doors.pids), doors.running, doors.replacing
        )

    # --- how ------------------------------------------------------------------------------------------------------

    async def _tell(self, state: FrontState) -> None:
        """All of it but the settings at once, so that front doors are told of it as one."""
        doors, before = self.doors, self.doors.leaving
        if state.api_keys is not None:  # first of all: once front doors know of instances, they serve
            doors.go_by(state.api_keys)
        doors.tell(state.rows, state.wanted)
        for id in before ^ set(state.leaving):
            doors.drain(id, id not in before)
        if state.paused_s or doors.paused_s:
            doors.pause(state.paused_s)
        doors.ask(state.asked)
        if state.settings != self._packed_settings:
            from proxy.config.settings import ProxySettings
            from proxy.workers.wire import unpacked

            await doors.configure(self._own(unpacked(state.settings, ProxySettings)))
            self._packed_settings = state.settings

    def _own(self, settings: ProxySettings) -> ProxySettings:
        """No arena of this machine is all that there is."""
        return replace(settings, arena="", key_file=self._key_file)
