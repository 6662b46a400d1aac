"""A keeper as those see it who decide what runs: their own process, or another one that outlives them.

The interface is one (`Keeper`), so that a stage joined to a cluster, which has no process for this, and a deployment,
whose stages go on when agent or controller die, start and watch their processes in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deploy.keeper.children import Children, Kept

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

    async def ready(self) -> None:
        """This part does its work. Should it end from now on it is started again, however often."""

    async def over(self, code: int) -> None:
        """All is to be taken down, and the deployment to end with this exit code. For the controller alone."""


class InProcess:
    """A `Keeper` whose children are this process's own. It collects no child but those, and only when asked for one.

    Attributes:
        code: what `over` has said: to end is for whoever has made this.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.code: int | None = None
        self._children = Children()
        self._running: dict[str, Child] = {}
        self._signals: list[int] = []
        self._signalled = asyncio.Event()

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
        self._collect()
        return self._runs(self._children.spawn(name, argv, env, output=output, passed=passed, tag=tag))

    async def adopt(self, name: str, pid: int, *, tag: bytes = b"") -> Child:
        self._collect()
        return self._runs(self._children.adopt(name, pid, tag=tag))

    async def note(self, name: str, tag: bytes, descriptor: int | None = None) -> None:
        self._children.note(name, tag, descriptor)

    async def forget(self, name: str) -> None:
        self._collect()
        self._children.forget(name)
        self._running.pop(name, None)

    async def entries(self) -> tuple[Entry, ...]:
        self._collect()
        return tuple(
            Entry(
                kept.name,
                kept.tag,
                kept.pid,
                kept.code,
                None if kept.descriptor is None else os.dup(kept.descriptor),
                self._running.get(kept.name),
            )
            for kept in self._children.kept.values()
        )

    async def signals(self) -> AsyncIterator[int]:
        told = 0
        while True:
            while told < len(self._signals):
                yield self._signals[told]
                told += 1
            self._signalled.clear()
            await self._signalled.wait()

    def tell(self, number: int) -> None:
        """A signal has come."""
        self._signals.append(number)
        self._signalled.set()

    async def ready(self) -> None:
        """Nobody starts this process again."""

    async def over(self, code: int) -> None:
        self.code = code

    def close(self) -> None:
        """Close the noted descriptors. Processes go on: to end them is for those who had them started."""
        self._children.close()

    def _runs(self, kept: Kept) -> Child:
        assert kept.pid is not None, "it has just begun"
        self._running[kept.name] = child = Child(kept.name, kept.tag, kept.pid, look=self._collect)
        return child

    def _collect(self) -> None:
        for ended in self._children.collect():
            self._running[ended.name].end(ended.code)
