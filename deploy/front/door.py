"""One front door: a row of the shared counters, which one process after the other fills.

The processes live on when whoever looks after them here has died; the next one finds them by what is written down and
goes on. What holds for a process beyond one life of ours is its mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deploy.front.shared import Shared
from deploy.host.children import PASSED_FROM, Child, Children
from deploy.host.environment import module_command

if TYPE_CHECKING:
    from proxy.workers.hub import Worker, WorkerHub
    from proxy.workers.shared_counters import SharedCounters
    from proxy.workers.wire import Setup

NAME = "front."
POLL_S = 0.02
LOOK_S = 0.25
"""How soon an end is noticed that the feed does not tell of."""

START_S = 60.0
ENDING_S = 5.0
"""Beyond the grace that requests in flight get."""

STDERR = 2


class Mark(StrEnum):
    """What is to become of a process."""

    STAYS = "stays"
    OUTDATED = "outdated"  # another one is to take its place
    RETIRED = "retired"  # it was told to end when its requests have, and nobody follows it


@dataclass(frozen=True)
class House:
    """What all doors are made of.

    Attributes:
        environment: of the processes. grace_s: how long requests may go on in one that is told to end.
        note: writes down who is there, and what is to become of each.
    """

    children: Children
    hub: WorkerHub
    shared: Shared
    counters: SharedCounters
    environment: Mapping[str, str]
    grace_s: float
    note: Callable[[], None] = lambda: None


class Door:
    """Args:
        child: the process that is there already, if any, and what is to become of it.

    Attributes:
        begun: done when a process of it serves; fails when its very first one never did.
        child: the present process, if any. worker: what it says of itself.
    """

    def __init__(self, house: House, row: int, child: Child | None = None, mark: Mark = Mark.STAYS) -> None:
        self.row = row
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.adopted = child is not None
        self.child = child
        self.mark = mark
        self.retired = asyncio.Event()
        self.worker: Worker | None = None
        self._house = house

    @property
    def name(self) -> str:
        return f"{NAME}{self.row}"

    def becomes(self, mark: Mark) -> None:
        """Noted before anything is done about it."""
        self.mark = mark
        self._house.note()

    def retire(self) -> None:
        """Its requests may end, and nobody is to follow."""
        self.becomes(Mark.RETIRED)
        self.retired.set()
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.child is not None and self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.pid, number)

    def is_late(self, number: int) -> bool:
        """Whether its process may go by an older roster than that of this number."""
        told = self.worker is not None and self.worker.told
        return self.child is not None and told and self._house.counters.roster(self.row) < number

    async def live(self, setup: Setup) -> tuple[float, str]:
        """One life: from its start, or from where it was found, until it is collected. Cancelled it goes on.

        Args:
            setup: what a process is told that starts now.

        Returns:
            For how long it served, and how it ended.
        """
        from proxy.workers.shared_ledger import settle

        house = self._house
        self.worker = worker = house.hub.expect(self.row, setup)
        if self.child is not None:  # it goes by the roster that a predecessor of ours has sent
            worker.told = house.counters.roster(self.row) > 0
        try:
            if self.child is None:
                self.child = await self._spawn()
                if self.retired.is_set():
                    self._signal(signal.SIGTERM)
            ended = await self._until_trouble(self.child, worker)
            await self.end()
        except OSError as error:  # no process, no descriptor, no memory left: another time there may be
            ended = 0.0, f"it cannot be started: {error}"
        finally:
            house.hub.ended(worker)
        settle(house.counters, self.row)
        self.child = self.worker = None
        house.note()
        return ended

    async def end(self) -> None:
        """Gracefully, if it serves and is heard; it is told of its instances until the end."""
        child, worker = self.child, self.worker
        if child is None:
            return
        try:
            if worker is not None and worker.serving and not (worker.parted or worker.trouble):
                self._signal(signal.SIGINT)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._house.grace_s + ENDING_S):
                        await child.exited()
        finally:
            self._signal(signal.SIGKILL)
        await child.exited()
        if worker is not None:
            worker.changed.set()

    async def _spawn(self) -> Child:
        house = self._house

        def noted(child: Child) -> None:
            self.child = child
            house.note()

        feed = house.shared.feed.getsockname()
        passed = (house.shared.listening.fileno(), house.shared.memory)
        numbers = [str(PASSED_FROM + at) for at in range(len(passed))]
        return await house.children.spawn(
            module_command("deploy.front.process", feed, str(self.row), *numbers),
            house.environment,
            output=STDERR,
            passed=passed,
            noted=noted,
        )

    async def _until_trouble(self, child: Child, worker: Worker) -> tuple[float, str]:
        """Until another one has to follow. Returns for how long it served, and why."""
        began = time.monotonic()
        served_at = parted_at = float("inf")
        reason = ""
        while not reason:
            worker.changed.clear()
            code, now = child.poll(), time.monotonic()
            if worker.serving:
                served_at = min(served_at, now)
                if not self.begun.done():
                    self.begun.set_result(None)
            parted_at = min(parted_at, now) if worker.parted else float("inf")
            if worker.trouble or code is not None:
                reason = worker.trouble or _how(code or 0)
            elif not worker.serving and now > began + START_S:
                reason = f"it does not serve after {START_S:.0f} s"
            elif now > parted_at + ENDING_S:
                reason = "it has closed its feed and does not end"
            else:
                # The feed ends a moment before its process, and the word of that takes a moment, too.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S if worker.parted else LOOK_S):
                        await worker.changed.wait()
        return max(0.0, time.monotonic() - served_at), reason


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
