"""The process that runs a test as the root of a deployment: orphans come to it, and none is left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

from deploy.host import processes
from deploy.host.children import Child, Children, be_root
from deploy.host.state import SharedState, StateFiles


class ChildrenHere(Children):
    """Attributes:
    known: all that were started or adopted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Child] = []

    def adopt(self, pid: int, born_ticks: int = 0) -> Child:
        child = super().adopt(pid, born_ticks)
        self.known.append(child)
        return child

    def close(self) -> None:
        for child in self.known:
            found = processes.stat(child.pid)
            if found is not None and found.start_ticks == child.born_ticks:
                processes.signal_process(child.pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):  # somebody has waited for it meanwhile
                    os.waitpid(child.pid, 0)


@dataclass
class StateHere:
    """A `State` that ends with this process."""

    sections: dict[str, bytes] = field(default_factory=dict)

    def read(self, name: str) -> bytes | None:
        return self.sections.get(name)

    def write(self, name: str, content: bytes) -> None:
        self.sections[name] = content

    async def kept(self) -> None:
        """It is."""


@dataclass
class RootHere:
    """What lives of control have in common."""

    files: StateFiles = field(default_factory=StateFiles.make)
    children: ChildrenHere = field(default_factory=ChildrenHere)

    def state(self) -> SharedState:
        """As the next life finds it."""
        return SharedState(self.files)


@contextlib.contextmanager
def root_here() -> Iterator[RootHere]:
    be_root()
    root = RootHere()
    try:
        yield root
    finally:
        root.children.close()
        for descriptor in (*root.files.halves, root.files.count):
            os.close(descriptor)
