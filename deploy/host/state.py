"""What the process that controls a deployment must know again when it is started again: named sections of bytes."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Protocol

import msgspec

COUNT = struct.Struct("=q")


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
        halves: of which one has the sections and the other one is written next.
        count: how often they have been written, which says which half is which.
    """

    halves: tuple[int, int]
    count: int

    @classmethod
    def make(cls) -> StateFiles:
        first, second, count = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("state.0", "state.1", "state"))
        return cls((first, second), count)

    def sections(self) -> dict[str, bytes]:
        """As they are now, whoever writes them meanwhile."""
        while True:
            written = self._written()
            descriptor = self.halves[written % 2]
            raw = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            if self._written() == written:  # else its half may have been the next one
                return msgspec.msgpack.decode(raw, type=dict[str, bytes]) if raw else {}

    def replace(self, sections: dict[str, bytes]) -> None:
        """All of them. A process that is killed meanwhile has changed nothing."""
        number = self._written() + 1
        half, raw = self.halves[number % 2], msgspec.msgpack.encode(sections)
        os.ftruncate(half, len(raw))
        at = 0
        while at < len(raw):
            at += os.pwrite(half, raw[at:], at)
        os.pwrite(self.count, COUNT.pack(number), 0)

    def _written(self) -> int:
        found = os.pread(self.count, COUNT.size, 0)
        return int(COUNT.unpack(found)[0]) if found else 0


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
