"""The lives of front doors: found or started, followed by another when they end, replaced one by one, ended together.

A front door is a process with a row of the shared counters, which one process after the other fills; a supervisor keeps
it running as it does a stage. Whatever becomes of one of them, the socket that all accept from and the memory of their
counters stay: no connection is refused while one is away. What is said to them is `proxy/workers/hub.py`'s business.
One that dies takes its clients' connections with it, and nothing else: what it held is released in the counters as soon
as it is collected.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from deploy.agent.stage_life import Noted, Record, Spawn
from deploy.agent.supervisor import StageEvents, StageSpec, Supervisor
from deploy.agent.waits import Patience
from deploy.front.shared import Shared
from deploy.host.children import PASSED_FROM, Child, Children
from deploy.host.environment import module_command
from deploy.host.processes import signal_process
from deploy.host.state import State
from epd_serve.endpoint import unix_url
from epd_serve.errors import EpdError
from proxy.workers.shared_counters import Cell

if TYPE_CHECKING:
    from proxy.workers.hub import Worker, WorkerHub
    from proxy.workers.shared_counters import SharedCounters
    from proxy.workers.wire import Setup

NAME = "front."
SECTION = "front doors"
"""Of the state."""

PATIENCE = Patience(
    start_s=60.0, poll_s=0.02, backoff_s=0.1, backoff_max_s=10.0, settled_s=10.0, hung_s=30.0, stop_grace_s=0.0
)
ENDING_S = 5.0
"""Beyond the grace that requests in flight get."""

PROMPT_S = 2.0
"""Within which a front door takes in what it is told, or is taken for hung."""

POLL_S = 0.02


class Mark(StrEnum):
    """What is to become of a process."""

    STAYS = "stays"
    OUTDATED = "outdated"  # another one is to take its place
    RETIRED = "retired"  # it was told to end when its requests have, and nobody follows it


class Door(msgspec.Struct, eq=False):
    """What is written down of one. `row`: of the counters. `record`: of its lives."""

    row: int
    record: Record = msgspec.field(default_factory=Record)
    mark: Mark = Mark.STAYS

    @property
    def name(self) -> str:
        return f"{NAME}{self.row}"


@dataclass(eq=False)
class FrontLives(StageEvents):
    """Keeps a number of front doors alive.

    Attributes:
        environment: of the processes.
        setup: what those are told that start from now on.
        say: takes a line for the operator.
    """

    children: Children
    state: State
    hub: WorkerHub
    shared: Shared
    counters: SharedCounters
    environment: Mapping[str, str]
    setup: Setup
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._folder = Path(self.shared.feed.getsockname()).parent
        self._supervisor = Supervisor(self, PATIENCE, start=self._start)
        self._doors: dict[str, Door] = {}
        self._workers: dict[str, Worker] = {}
        self._gone = asyncio.Event()
        self._found = asyncio.Event()
        self._replacing = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled, which leaves the processes as they are.

        Raises:
            EpdError: one did not get as far as serving when it was started first.
        """
        try:
            self._find()
            await self.hub.start()  # not before: who is found watches again
            while len(self._staying) < self.shared.workers:
                self._open()
            self._found.set()
            await self.begun()
            await self._go_on_replacing()
            await asyncio.get_running_loop().create_future()
        finally:
            await self._supervisor.leave()

    async def begun(self) -> None:
        """Wait until all of them have served. Raises EpdError."""
        await self._found.wait()
        await asyncio.gather(*(self._supervisor.answered(door.name) for door in self._staying))

    async def replace(self) -> None:
        """Each in its turn by another one, which serves before its predecessor leaves and lets its requests end.

        Raises:
            EpdError: another one does not serve; those that do are left.
        """
        await self._found.wait()
        for door in self._staying:
            door.mark = Mark.OUTDATED
        self.note()
        await self._replace_outdated()

    @property
    def replacing(self) -> bool:
        return bool(self._marked(Mark.OUTDATED)) or self._replacing.locked()

    async def prompt(self, number: int) -> None:
        """Wait until none goes by an older roster than that of this number. Who does for too long is killed."""
        until = time.monotonic() + PROMPT_S
        while late := [door for door in self._doors.values() if self._is_late(door, number)]:
            if time.monotonic() > until:
                for door in late:
                    self.say(f"{door.name} has not taken in the roster within {PROMPT_S:g} s")
                    signal_process(door.record.pid, signal.SIGKILL)
                until = float("inf")
            await asyncio.sleep(POLL_S / 4)

    async def end(self) -> None:
        """All of them gracefully; none is followed by another. `run` is to be cancelled after that."""
        await asyncio.gather(*(self._end(door) for door in tuple(self._doors.values())))

    @property
    def serving(self) -> list[int]:
        """Rows of those that take connections."""
        return [worker.row for worker in self._workers.values() if worker.serving]

    @property
    def pids(self) -> dict[str, int]:
        return {door.name: door.record.pid for door in self._doors.values() if door.record.pid}

    def _marked(self, mark: Mark) -> list[Door]:
        return [door for door in self._doors.values() if door.mark is mark]

    @property
    def _staying(self) -> list[Door]:
        return [door for door in self._doors.values() if door.mark is not Mark.RETIRED]

    def _is_late(self, door: Door, number: int) -> bool:
        """Whether its process may go by an older roster than that of this number."""
        worker = self._workers.get(door.name)
        return worker is not None and worker.told and self._roster(door) < number

    def _roster(self, door: Door) -> int:
        return self.counters.said(door.row, Cell.ROSTER)

    # --- what is written down -------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Those that a life of this process before has started. Who of them has ended meanwhile is settled."""
        for door in msgspec.msgpack.decode(self.state.read(SECTION) or b"\x90", type=list[Door]):
            self._doors[door.name] = door
            process = self.children.adopt(door.record.pid, door.record.born_ticks) if door.record.pid else None
            if process is not None:
                self._expect(door, told=self._roster(door) > 0)
                if process.poll() is not None:
                    door.record.pid = 0  # by now it may be a stranger's
            self._keep(door, process)
            if door.mark is Mark.RETIRED:
                self._retire(door)  # it may not have been told

    def note(self) -> None:
        self.state.write(SECTION, msgspec.msgpack.encode(list(self._doors.values())))

    # --- one of them ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        taken = {door.row for door in self._doors.values()}
        door = Door(next(row for row in range(self.counters.rows) if row not in taken))
        self._doors[door.name] = door
        self._keep(door, None)

    def _keep(self, door: Door, process: Child | None) -> None:
        feed, own = self.shared.feed.getsockname(), self._folder / f"{door.name}.sock"
        passed = (str(PASSED_FROM + at) for at in range(2))
        command = Spawn(
            module_command("deploy.front.process", feed, str(door.row), str(own), *passed), self.environment
        )
        log = self._folder / f"{door.name}.log"
        spec = StageSpec(door.name, unix_url(own), log, lambda: command, what="front door", ends_by=signal.SIGINT)
        self._supervisor.add(spec, door.record, process)

    async def _start(self, command: Spawn, log: BinaryIO, noted: Noted) -> Child:
        """A `deploy.agent.stage_life.Start`."""
        passed = (self.shared.listening.fileno(), self.shared.memory)
        return await self.children.spawn(command.argv, command.env, output=log.fileno(), passed=passed, noted=noted)

    def _retire(self, door: Door) -> None:
        """Its requests may end, and nobody is to follow."""
        door.mark = Mark.RETIRED
        self.note()
        self._supervisor.retire(door.name)
        if door.record.pid:
            signal_process(door.record.pid, signal.SIGTERM)

    async def _end(self, door: Door) -> None:
        await self._supervisor.remove(door.name, self.setup.grace_s + ENDING_S)
        self._collected(door.name)
        if self._doors.pop(door.name, None) is not None:
            self.note()

    def _expect(self, door: Door, *, told: bool = False) -> None:
        own = unix_url(self._folder / f"{door.name}.sock")
        worker = self._workers[door.name] = self.hub.expect(door.row, own, self.setup)
        worker.told, worker.serving = told, bool(door.record.up_at)

    def _collected(self, name: str) -> None:
        """Nothing of its process is left."""
        from proxy.workers.shared_counters import settle

        if (worker := self._workers.pop(name, None)) is not None:
            self.hub.ended(worker)
            settle(self.counters, worker.row)

    # --- what the supervisor says ---------------------------------------------------------------------------------

    def before_spawn(self, stage: str) -> None:
        self._collected(stage)  # where its process was found ended before it had begun, nobody has said so
        (self._folder / f"{stage}.sock").unlink(missing_ok=True)
        if self._doors[stage].mark is Mark.OUTDATED:  # another one it is
            self._doors[stage].mark = Mark.STAYS
        self._expect(self._doors[stage])

    def up(self, stage: str) -> None:
        self._workers[stage].serving = True

    def down(self, stage: str, reason: str, retry_in_s: float | None) -> None:
        if retry_in_s is not None:
            self._collected(stage)
            self.say(f"{stage} ended: {reason}; another starts in {retry_in_s:.1f} s")

    def over(self, stage: str, reason: str) -> None:
        self._collected(stage)
        del self._doors[stage]
        self._gone.set()

    # --- one after the other --------------------------------------------------------------------------------------

    async def _replace_outdated(self) -> None:
        async with self._replacing:
            try:
                while outdated := self._marked(Mark.OUTDATED):
                    await self._retired()
                    if len(self._staying) <= self.shared.workers:
                        self._open()
                    fresh = self._marked(Mark.STAYS)
                    await asyncio.gather(*(self._supervisor.answered(door.name) for door in fresh))
                    self._retire(outdated[0])
                    await self._retired()
                for door in self._staying[self.shared.workers :]:
                    self._retire(door)  # outdated ones have ended by themselves, and were followed
            except EpdError:
                for door in self._marked(Mark.OUTDATED):
                    door.mark = Mark.STAYS
                self.note()
                raise

    async def _retired(self) -> None:
        """Wait until there is a free row: those that were retired have been collected."""
        while self._marked(Mark.RETIRED):
            self._gone.clear()
            await self._gone.wait()

    async def _go_on_replacing(self) -> None:
        try:
            await self._replace_outdated()
        except EpdError as error:
            self.say(f"the front doors are not replaced: {error}")
