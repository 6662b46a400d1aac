"""The lives of front doors: started, followed by another when they end, replaced one by one, ended together.

Their parent keeps the socket that all of them accept from, so that no connection is refused while one is away, and the
memory of the counters they share. What is said to them is `proxy/workers/hub.py`'s business. One that dies takes its
clients' connections with it, and nothing else: what it held is released in the counters as soon as it is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.host.environment import module_command
from epd_serve.errors import EpdError

if TYPE_CHECKING:
    from proxy.workers.hub import Worker, WorkerHub
    from proxy.workers.shared_counters import SharedCounters
    from proxy.workers.wire import Setup

POLL_S = 0.02
LOOK_S = 0.25
"""How soon an end is noticed that the feed does not tell of."""

START_S = 60.0
SETTLED_S = 10.0
BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0
ENDING_S = 5.0
"""Beyond the grace that requests in flight get."""

PROMPT_S = 2.0
"""Within which a front door takes in what it is told, or is taken for hung."""


@dataclass(frozen=True)
class _Life:
    worker: Worker
    process: subprocess.Popen[bytes]


class _Door:
    """A place that one process after the other fills.

    Attributes:
        begun: done when its first process serves; fails when that did not.
        life: the present one, if any. retired: no other follows it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.life: _Life | None = None
        self.retired = False

    def begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)


class FrontLives:
    """Keeps a number of front doors alive.

    Args:
        counters, memory: the shared counters, with a row more than there are front doors, and the descriptor of their
            memory.
        listening: what all of them accept from. It has to be listening.
        environment: of the processes.
        grace_s: how long one that is told to end may take.
        say: takes a line for the operator.

    Attributes:
        setup: what those are told that start from now on.
    """

    def __init__(
        self,
        hub: WorkerHub,
        setup: Setup,
        counters: SharedCounters,
        memory: int,
        listening: socket.socket,
        feed: Path,
        environment: Mapping[str, str],
        *,
        grace_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.setup = setup
        self._hub = hub
        self._counters = counters
        self._memory = memory
        self._listening = listening
        self._feed = feed
        self._environment = environment
        self._grace_s = grace_s
        self._say = say
        self._rows = list(reversed(range(counters.rows)))  # of nobody; the next one gets the last
        self._doors: dict[_Door, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def run(self) -> None:
        """Until cancelled; then ends them gracefully.

        Raises:
            EpdError: one did not get as far as serving when it was started first.
        """
        try:
            async with self._group:
                for number in range(self._counters.rows - 1):
                    self._open(number)
                await self.begun()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def begun(self) -> None:
        """Wait until all of them have served. Raises EpdError."""
        await asyncio.gather(*(asyncio.shield(door.begun) for door in self._doors))

    async def replace(self) -> None:
        """Each in its turn by another one, which serves before its predecessor leaves and lets its requests end.

        Raises:
            EpdError: another one does not serve; those that do are left.
        """
        for door in list(self._doors):
            follower = self._open(door.number)
            await asyncio.shield(follower.begun)
            door.retired = True
            task = self._doors[door]
            if door.life is None:
                task.cancel()  # it was about to have another one
            else:
                door.life.process.send_signal(signal.SIGTERM)
            await asyncio.wait([task])

    async def prompt(self, number: int) -> None:
        """Wait until none goes by an older roster than that of this number. Who does for too long is killed."""
        until = time.monotonic() + PROMPT_S
        while late := [life for life in self.living if self._is_late(life, number)]:
            if time.monotonic() > until:
                for life in late:
                    life.worker.trouble = f"it has not taken in the roster within {PROMPT_S:g} s"
                    life.worker.changed.set()
            await asyncio.sleep(POLL_S / 4)

    def _is_late(self, life: _Life, number: int) -> bool:
        return life.worker.told and self._counters.roster(life.worker.row) < number

    @property
    def living(self) -> list[_Life]:
        """Those that are not collected."""
        return [door.life for door in self._doors if door.life is not None]

    @property
    def pids(self) -> dict[str, int]:
        return {f"front.{door.number}": door.life.process.pid for door in self._doors if door.life is not None}

    def _open(self, number: int) -> _Door:
        door = _Door(number)
        self._doors[door] = task = self._group.create_task(self._keep(door), name=f"front door {number}")
        task.add_done_callback(lambda _: self._doors.pop(door))
        return door

    async def _keep(self, door: _Door) -> None:
        failures = 0
        while True:
            served_s, reason = await self._live(door)
            if not door.begun.done():
                door.begun.set_exception(EpdError(f"proxy worker {door.number} did not start: {reason}"))
                return
            failures = 0 if served_s >= SETTLED_S else failures + 1
            if door.retired:
                return
            delay_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures - 1, 16)) if failures else 0.0
            self._say(f"proxy worker {door.number} ended: {reason}; another starts in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)

    async def _live(self, door: _Door) -> tuple[float, str]:
        """One life, from its start until it is collected. Returns for how long it served, and how it ended."""
        from proxy.workers.shared_ledger import settle

        row = self._rows.pop()
        worker = self._hub.expect(row, self.setup)
        try:
            door.life = life = _Life(worker, self._spawn(row))
            try:
                return await self._until_trouble(door, life)
            finally:
                await self._end(life)
                door.life = None
        except OSError as error:  # no process, no descriptor, no memory left: another time there may be
            return 0.0, f"it cannot be started: {error}"
        finally:
            settle(self._counters, row)
            self._hub.ended(worker)
            self._rows.append(row)

    def _spawn(self, row: int) -> subprocess.Popen[bytes]:
        inherited = (self._listening.fileno(), self._memory)
        return subprocess.Popen(
            module_command("deploy.front.process", str(self._feed), str(row), *map(str, inherited)),
            env=dict(self._environment),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
        )

    async def _until_trouble(self, door: _Door, life: _Life) -> tuple[float, str]:
        """Until another one has to follow. Returns for how long it served, and why."""
        worker, began = life.worker, time.monotonic()
        served_at = parted_at = float("inf")
        reason = ""
        while not reason:
            worker.changed.clear()
            code, now = life.process.poll(), time.monotonic()
            if worker.serving:
                served_at = min(served_at, now)
                door.begin()
            parted_at = min(parted_at, now) if worker.parted else float("inf")
            if worker.trouble or code is not None:
                reason = worker.trouble or _how(code or 0)
            elif not worker.serving and now > began + START_S:
                reason = f"it does not serve after {START_S:.0f} s"
            elif now > parted_at + ENDING_S:
                reason = "it has closed its feed and does not end"
            else:
                # The feed ends a moment before its process: no pidfds or child watchers, which some containers lack.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S if worker.parted else LOOK_S):
                        await worker.changed.wait()
        return max(0.0, time.monotonic() - served_at), reason

    async def _end(self, life: _Life) -> None:
        """Gracefully, if it serves and is heard; it is told of its instances until the end."""
        process, worker = life.process, life.worker
        try:
            if process.poll() is None and worker.serving and not (worker.parted or worker.trouble):
                process.send_signal(signal.SIGINT)
                until = time.monotonic() + self._grace_s + ENDING_S
                while process.poll() is None and time.monotonic() < until:  # noqa: ASYNC110 - as in `_until_trouble`
                    await asyncio.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
