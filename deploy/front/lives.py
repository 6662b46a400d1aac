"""The lives of front doors: found or started, followed by another when they end, replaced one by one, ended together.

Whatever becomes of one of them, the socket that all accept from and the memory of their counters stay: no connection is
refused while one is away. What is said to them is `proxy/workers/hub.py`'s business. One that dies takes its clients'
connections with it, and nothing else: what it held is released in the counters as soon as it is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from deploy.front.door import ENDING_S, POLL_S, Door, House, Mark
from deploy.host.state import State
from epd_serve.errors import EpdError

if TYPE_CHECKING:
    from proxy.workers.wire import Setup

SECTION = "front doors"
"""Of the state."""

SETTLED_S = 10.0
BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0
PROMPT_S = 2.0
"""Within which a front door takes in what it is told, or is taken for hung."""


class _Noted(msgspec.Struct, frozen=True, array_like=True):
    row: int
    pid: int
    born_ticks: int
    mark: Mark


class FrontLives:
    """Keeps a number of front doors alive.

    Args:
        state: has what is known of the processes from one life of this one to the next.
        say: takes a line for the operator.

    Attributes:
        setup: what those are told that start from now on.
    """

    def __init__(self, house: House, state: State, setup: Setup, *, say: Callable[[str], None]) -> None:
        self.setup = setup
        self._house = replace(house, note=self._note)
        self._state = state
        self._say = say
        self._doors: dict[Door, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._ending = False
        self._found = asyncio.Event()
        self._replacing = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled, which leaves the processes as they are.

        Raises:
            EpdError: one did not get as far as serving when it was started first.
        """
        try:
            async with self._group:
                self._find()
                await self._house.hub.start()  # not before: who is found says hello
                while len(self._staying) < self._house.shared.workers:
                    self._open()
                self._found.set()
                if self._marked(Mark.OUTDATED):
                    self._group.create_task(self._go_on_replacing())
                await self.begun()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def begun(self) -> None:
        """Wait until all of them have served. Raises EpdError."""
        await self._found.wait()
        await asyncio.gather(*(asyncio.shield(door.begun) for door in self._staying))

    async def replace(self) -> None:
        """Each in its turn by another one, which serves before its predecessor leaves and lets its requests end.

        Raises:
            EpdError: another one does not serve; those that do are left.
        """
        await self._found.wait()
        for door in self._staying:
            door.becomes(Mark.OUTDATED)
        await self._replace_outdated()

    @property
    def replacing(self) -> bool:
        return bool(self._marked(Mark.OUTDATED)) or self._replacing.locked()

    async def prompt(self, number: int) -> None:
        """Wait until none goes by an older roster than that of this number. Who does for too long is killed."""
        until = time.monotonic() + PROMPT_S
        while late := [door.worker for door in self._doors if door.is_late(number) and door.worker is not None]:
            if time.monotonic() > until:
                for worker in late:
                    worker.trouble = f"it has not taken in the roster within {PROMPT_S:g} s"
                    worker.changed.set()
            await asyncio.sleep(POLL_S / 4)

    async def end(self) -> None:
        """All of them gracefully; none is followed by another. `run` is to be cancelled after that."""
        self._ending = True
        for door in self._doors:
            door.retired.set()
        tasks = [*self._doors.values()]
        await asyncio.gather(*(door.end() for door in self._doors))
        if tasks:  # they collect, where `run` goes on
            await asyncio.wait(tasks, timeout=ENDING_S)

    @property
    def serving(self) -> list[Door]:
        """Those that take connections."""
        return [door for door in self._doors if door.worker is not None and door.worker.serving]

    @property
    def pids(self) -> dict[str, int]:
        return {door.name: door.child.pid for door in self._doors if door.child is not None}

    def _marked(self, mark: Mark) -> list[Door]:
        return [door for door in self._doors if door.mark is mark]

    @property
    def _staying(self) -> list[Door]:
        return [door for door in self._doors if door.mark is not Mark.RETIRED]

    def _find(self) -> None:
        """Those that an earlier life of this process has started. Who of them has ended meanwhile is settled."""
        from proxy.workers.shared_ledger import settle

        noted = msgspec.msgpack.decode(self._state.read(SECTION) or b"\x90", type=list[_Noted])
        for one in noted:
            child = self._house.children.adopt(one.pid, one.born_ticks)
            if child.poll() is not None:
                settle(self._house.counters, one.row)
            else:
                self._keep(Door(self._house, one.row, child, one.mark))
        for door in self._marked(Mark.RETIRED):
            door.retire()  # it may not have been told

    def _note(self) -> None:
        there = [(door, door.child) for door in self._doors if door.child is not None]
        noted = [_Noted(door.row, child.pid, child.born_ticks, door.mark) for door, child in there]
        self._state.write(SECTION, msgspec.msgpack.encode(noted))

    def _open(self) -> Door:
        taken = {door.row for door in self._doors}
        door = Door(self._house, next(row for row in range(self._house.counters.rows) if row not in taken))
        self._keep(door)
        return door

    def _keep(self, door: Door) -> None:
        self._doors[door] = self._group.create_task(self._kept(door), name=f"front door {door.row}")

    async def _kept(self, door: Door) -> None:
        failures = 0
        while not self._ending:
            served_s, reason = await door.live(self.setup)
            if not (door.begun.done() or door.adopted or self._ending):
                door.begun.set_exception(EpdError(f"{door.name} did not start: {reason}"))
                break
            if door.mark is Mark.RETIRED or self._ending:
                break
            failures = 0 if served_s >= SETTLED_S else failures + 1
            delay_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures - 1, 16)) if failures else 0.0
            self._say(f"{door.name} ended: {reason}; another starts in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await door.retired.wait()
                    break
            if door.mark is Mark.OUTDATED:  # the next one is not
                door.mark = Mark.STAYS
        self._doors.pop(door, None)

    async def _replace_outdated(self) -> None:
        async with self._replacing:
            try:
                while outdated := self._marked(Mark.OUTDATED):
                    await self._end_retired()
                    if len(self._staying) <= self._house.shared.workers:
                        self._open()
                    await asyncio.gather(*(asyncio.shield(door.begun) for door in self._marked(Mark.STAYS)))
                    outdated[0].retire()
                    await self._end_retired()
            except EpdError:
                for door in self._marked(Mark.OUTDATED):
                    door.becomes(Mark.STAYS)
                raise

    async def _end_retired(self) -> None:
        """Wait until there is a free row: one that was retired has been collected."""
        for door in self._marked(Mark.RETIRED):
            await asyncio.wait([self._doors[door]])

    async def _go_on_replacing(self) -> None:
        try:
            await self._replace_outdated()
        except EpdError as error:
            self._say(f"the front doors are not replaced: {error}")
