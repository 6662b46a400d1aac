"""What a keeper is asked: by those in its own process (`in_process.py`), or by others, which it outlives (`client.py`).

The interface is one, so that a proxy started by itself, which has no process for this, and a deployment, whose stages
go on when agent or controller die, start and watch their processes in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deploy.keeper.messages import PartRow

POLL_S = 0.05


class Child:
    """A process that somebody keeps: the leader of its own session and process group.

    Args:
        tag: that of its entry when it began.
        look: called before each answer, where nobody else tells of the end.
    """

    def __init__(
        self, name: str, tag: bytes, pid: int, code: int | None = None, look: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self.tag = tag
        self.pid = pid
        self._code = code
        self._look = look
        self._ended = asyncio.Event()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that has ended it; None while it runs."""
        if self._code is None and self._look is not None:
            self._look()
        return self._code

    async def exited(self) -> int:
        """Wait for its end. The caller bounds the wait."""
        while (code := self.poll()) is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._look is not None else None):
                    await self._ended.wait()
        return code

    def end(self, code: int) -> None:
        """It has ended."""
        self._code = code
        self._ended.set()


@dataclass(frozen=True)
class Entry:
    """What is kept under a name.

    Attributes:
        tag: as it was noted last; says nothing to the keeper.
        pid: of the last process; None where there was none.
        code: how that ended; None while it runs.
        descriptor: a copy of the one that was noted, which whoever asked for it closes.
        child: the process, also one that has ended.
    """

    name: str
    tag: bytes
    pid: int | None
    code: int | None
    descriptor: int | None
    child: Child | None


class Keeper(Protocol):
    """Requests are made in the order of the calls. Each raises OSError when the keeper has gone.

    Attributes:
        pid: of the process whose children they are: with that one they die.
    """

    pid: int

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        passed: Sequence[int] = (),
        tag: bytes = b"",
    ) -> Child:
        """Start a program in a session of its own, with an empty stdin, under a name that does not run.

        Args:
            output: descriptor that becomes its stdout and stderr.
            passed: descriptors that it finds as 3, 4, 5 and so on.
            tag: of the entry; an empty one leaves what was noted before, as the noted descriptor is left.

        Raises:
            ValueError: the name runs. OSError: the program cannot be executed.
        """

    async def adopt(self, name: str, pid: int, *, tag: bytes = b"") -> Child:
        """Keep a process that has become the keeper's child because its own parent has ended.

        Raises:
            ValueError: the name runs, or the process has one. ProcessLookupError: no living child of the keeper.
        """

    async def note(self, name: str, tag: bytes, descriptor: int | None = None) -> None:
        """Set the tag of an entry, and a copy of the descriptor, if there is one. Makes an entry that is missing."""

    async def forget(self, name: str) -> None:
        """Remove an entry, if there is one.

        Raises:
            ValueError: it runs.
        """

    async def entries(self) -> tuple[Entry, ...]:
        """All that this part of the deployment has had kept, whichever life of it, in the order of making."""

    def signals(self) -> AsyncIterator[int]:
        """What the operator has sent to the deployment, at once and ever after: also what an earlier life was told."""

    async def parts(self) -> tuple[PartRow, ...]:
        """The parts of the deployment; none where this process is all of it."""

    async def ready(self) -> None:
        """This part does its work. Should it end from now on it is started again, however often."""

    async def over(self, code: int) -> None:
        """All that is left is to be killed, and the deployment to end with this exit code. For the controller alone."""


class Signals:
    """Those that have come, for whoever asks whenever."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._come = asyncio.Event()

    def add(self, number: int) -> None:
        self._numbers.append(number)
        self._come.set()

    async def follow(self) -> AsyncIterator[int]:
        """For one who asks at a time."""
        told = 0
        while True:
            while told < len(self._numbers):
                told += 1
                yield self._numbers[told - 1]
            self._come.clear()
            await self._come.wait()
