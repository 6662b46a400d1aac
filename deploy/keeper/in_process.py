"""A keeper in the process of who asks it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence

from deploy.keeper.children import Children, Kept
from deploy.keeper.interface import Child, Entry, Signals
from deploy.keeper.messages import PartRow


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
        self._signals = Signals()

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

    def signals(self) -> AsyncIterator[int]:
        return self._signals.follow()

    def tell(self, number: int) -> None:
        """A signal has come."""
        self._signals.add(number)

    async def parts(self) -> tuple[PartRow, ...]:
        return ()

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
