"""What the process that controls a deployment must know again when it is started again: named sections of bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import msgspec


class State(Protocol):
    """Sections by name. Whoever reads finds an old content or a new one, never half of one."""

    def read(self, name: str) -> bytes | None:
        """The last content; None before the first."""

    def write(self, name: str, content: bytes) -> None:
        """At once or soon; of several contents that wait the newest is enough."""

    async def kept(self) -> None:
        """Returns when what was written before is sure to be found."""


@dataclass(frozen=True)
class StateFiles:
    """Descriptors of files in memory that every life of control inherits. A full or slow disk stops none, and with the
    root they go.

    Attributes:
        halves: of which one has the sections and the other one is written next. which: says which, in one byte.
    """

    halves: tuple[int, int]
    which: int

    @classmethod
    def make(cls) -> StateFiles:
        first, second, which = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("state.0", "state.1", "state"))
        return cls((first, second), which)

    def sections(self) -> dict[str, bytes]:
        """As they are now, whoever has written them."""
        descriptor = self.halves[self._current()]
        raw = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return msgspec.msgpack.decode(raw, type=dict[str, bytes]) if raw else {}

    def replace(self, sections: dict[str, bytes]) -> None:
        """All of them. A process that is killed meanwhile has changed nothing."""
        other = 1 - self._current()
        raw = msgspec.msgpack.encode(sections)
        os.ftruncate(self.halves[other], len(raw))
        written = 0
        while written < len(raw):
            written += os.pwrite(self.halves[other], raw[written:], written)
        os.pwrite(self.which, bytes([other]), 0)

    def _current(self) -> int:
        found = os.pread(self.which, 1, 0)
        return found[0] if found else 0


class SharedState:
    """A `State` in `StateFiles`, of the one process that writes there now."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._sections = files.sections()

    def read(self, name: str) -> bytes | None:
        return self._sections.get(name)

    def write(self, name: str, content: bytes) -> None:
        if self._sections.get(name) != content:
            self._sections[name] = content
            self._files.replace(self._sections)

    async def kept(self) -> None:
        """It is."""
