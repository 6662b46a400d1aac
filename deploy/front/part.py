"""The front doors of one node, told everything over a socket by whoever controls the deployment.

Whoever looks after them may be killed, as they may: they go on, and the next life finds them by what is written down.
What it was told last is, too, so that a front door that has to be started meanwhile knows of the instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from deploy.front.doors import FrontDoors
from deploy.front.messages import (
    AllSeen,
    Call,
    Counts,
    Done,
    End,
    Idle,
    Leases,
    Look,
    PausableS,
    Ready,
    Restart,
    Stamps,
    State,
    UntilEmpty,
    UntilQuiet,
    Watch,
    Word,
    to_front,
)
from deploy.front.shared import Shared
from deploy.host.children import Children
from deploy.host.rundir import RunDir
from deploy.host.state import State as Noted
from deploy.runtime.answering import Answering, Asker
from epd_serve.errors import EpdError
from proxy.registry.warm_links import GRACE_S
from proxy.workers.shared_counters import Asked

if TYPE_CHECKING:
    from proxy.config.settings import ProxySettings

LOOK_S = 0.25
"""Between two looks at what has changed, for those who watch: people, in the end."""

STATE, ENDED = "front state", "front ended"
"""Sections of the state: what was told last, and that there are to be no front doors any more."""


@dataclass(frozen=True)
class FrontSetup:
    """Attributes:
    settings: to begin with. What is the node's own in them it sets itself.
    host, port: where clients come in, for a node that is not handed a socket that is bound already.
    workers: how many front doors.
    grace_s: how long requests in flight may go on at the end. drain_s: at the end of one of them.
    link_grace_s: as of `InstanceTable`.
    """

    settings: ProxySettings
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    grace_s: float = 2.0
    drain_s: float = 30.0
    link_grace_s: float = GRACE_S


class _Noted(msgspec.Struct):
    """`paused_until`: of the machine's monotonic clock, seconds."""

    state: State
    paused_until: float

    @classmethod
    def of(cls, state: State) -> _Noted:
        return cls(state, time.monotonic() + state.paused_s)

    def now(self) -> State:
        return msgspec.structs.replace(self.state, paused_s=max(0.0, self.paused_until - time.monotonic()))


async def run_front(
    setup: FrontSetup,
    run: RunDir,
    shared: Shared,
    key_file: str,
    children: Children,
    state: Noted,
    listening: socket.socket,
) -> None:
    """Until cancelled.

    Args:
        key_file: of the deployment's key, here.
        listening: the Unix socket on which it is asked. Whoever connects before it listens waits.

    Raises:
        EpdError: the front doors do not start.
    """
    await _FrontPart(setup, run, shared, key_file, children, state).live(listening)


class _FrontPart:
    def __init__(
        self, setup: FrontSetup, run: RunDir, shared: Shared, key_file: str, children: Children, state: Noted
    ) -> None:
        self._key_file = key_file
        self._noted = state
        self._packed_settings = b""
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answering = Answering(to_front, run.path, self._carry_out)
        self._doors = FrontDoors(
            self._own(setup.settings),
            shared,
            children,
            state,
            grace_s=setup.grace_s,
            drain_s=setup.drain_s,
            say=self._answering.say,
            launch_id=run.launch_id,
            link_grace_s=setup.link_grace_s,
        )

    async def live(self, listening: socket.socket) -> None:
        async with self._answering.served(listening) as server:
            if self._noted.read(ENDED) is not None:
                await server.serve_forever()
            tasks = []
            if (noted := self._noted.read(STATE)) is not None:
                # first of all: front doors that are there are told nothing else meanwhile
                state = msgspec.msgpack.decode(noted, type=_Noted).now()
                tasks.append(asyncio.create_task(self._take_in(state), name="what was told last"))
            tasks.append(asyncio.create_task(self._doors.serve(), name="front doors"))
            tasks.append(asyncio.create_task(self._begin(), name="beginning"))
            try:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in ended:
                    task.result()
            except EpdError as error:
                await self._fail(error)
                raise
            finally:  # which leaves the front doors as they are
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _begin(self) -> None:
        await self._doors.ready()
        self._begun.set_result(None)
        await asyncio.get_running_loop().create_future()  # the front doors decide when this ends

    async def _fail(self, error: EpdError) -> None:
        """Tell those who wait, and those who come within the moment that is left."""
        self._answering.say(error.message)
        if not self._begun.done():
            self._begun.set_exception(error)
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(EpdError):
                await self._begun

    async def _carry_out(self, number: int, call: Call, asker: Asker) -> Done:
        doors = self._doors
        match call:
            case State():
                await self._take_in(call)
                self._noted.write(STATE, msgspec.msgpack.encode(_Noted.of(call)))
            case Ready():
                await asyncio.shield(self._begun)
                await doors.seen()
            case AllSeen():
                await doors.seen()
            case UntilEmpty(id):
                await doors.until_empty(id)
            case UntilQuiet(id):
                await doors.until_quiet(id)
            case PausableS():
                seconds = await doors.pausable_s()
                return Done(number, pausable_s=None if math.isinf(seconds) else seconds)
            case Counts():
                return Done(number, counts=await doors.counted())
            case Look(question):
                return Done(number, records=await doors.look(question))
            case Stamps(subjects):
                stamps = await doors.stamps(subjects)
                return Done(number, stamps=stamps, time_s=time.monotonic())
            case Restart():
                await doors.restart()
            case Idle():
                await doors.idle()
            case End():
                self._noted.write(ENDED, b"")
                await doors.end()
            case Watch():
                await self._watch(number, asker)
        return Done(number)

    async def _take_in(self, state: State) -> None:
        """All of it but the settings at once, so that front doors are told of it as one."""
        doors, before = self._doors, self._doors.leaving
        if state.api_keys is not None:  # first of all: once front doors know of instances, they serve
            doors.go_by(state.api_keys)
        doors.publish(state.instances, state.wanted)
        for id in before - set(state.leaving):
            doors.take_back(id)
        for id in set(state.leaving) - before:
            doors.drain(id)
        if state.paused_s or doors.paused_s:
            doors.pause(state.paused_s)
        if state.asked is Asked.LEAVE:
            doors.announce()
        elif state.asked is Asked.DRAIN:
            doors.begin()
        if state.settings != self._packed_settings:
            from proxy.workers.wire import unpacked_settings

            self._packed_settings = state.settings
            await doors.configure(self._own(unpacked_settings(state.settings)))

    def _own(self, settings: ProxySettings) -> ProxySettings:
        """No arena of this machine is all that there is."""
        return replace(settings, arena=None, key_file=self._key_file)

    async def _watch(self, number: int, asker: Asker) -> None:
        told: Word | None = None
        with asker.watches():
            while not asker.gone:
                if (word := self._word(number)) != told:
                    await asker.tell(word)
                    told = word
                await asyncio.sleep(LOOK_S)

    def _word(self, number: int) -> Word:
        doors = self._doors
        leases = tuple(
            Leases(id, incarnation, {work: tally for work, tally in tallies.items() if tally.acquired})
            for (id, incarnation), tallies in doors.tallies().items()
        )
        held = tuple(one for one in leases if one.tallies)
        return Word(number, held, dict(doors.pids), doors.running, doors.replacing)
