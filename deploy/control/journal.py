"""What the controller of a deployment remembers of what was wanted: one note, a few lines, replaced as a whole."""

from __future__ import annotations

import time

import msgspec

from deploy.control import progress
from deploy.control.progress import Change
from deploy.host.state import State

WANTED = "wanted.json"
"""The name of the note."""

DEPTH = 16
"""Layouts that are remembered for `undo`."""


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The latest change, under way or over, as `Change` has it; its steps are not kept.

    Attributes:
        began: seconds since the epoch, for the next controller may run on another machine.
    """

    number: int
    what: str
    before: str
    layout: str
    pause_s: float
    state: progress.State
    reason: str
    began: float
    seconds: float | None
    paused_s: float
    cut: int

    @classmethod
    def of(cls, change: Change) -> Latest:
        values = {name: getattr(change, name) for name in cls.__struct_fields__}
        return cls(**{**values, "began": time.time() - (time.monotonic() - change.began)})

    def change(self) -> Change:
        """It goes on. What is late in it is so from now on."""
        began = time.monotonic() - (time.time() - self.began)
        return Change(**{**msgspec.structs.asdict(self), "began": began})


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    layouts: that were wanted, the present one last.
    change: the latest, if there was one.
    unwanted: ids of instances that are to be replaced although their like is wanted.
    paused_until: seconds since the epoch, 0 while requests do not wait.
    """

    layouts: tuple[str, ...]
    change: Latest | None = None
    unwanted: tuple[str, ...] = ()
    paused_until: float = 0.0


class Journal:
    """The note."""

    def __init__(self, notes: State) -> None:
        self._notes = notes

    def read(self) -> Record | None:
        """The last record; None before the first.

        Raises:
            msgspec.DecodeError: somebody else wrote there.
        """
        noted = self._notes.read(WANTED)
        return msgspec.json.decode(noted, type=Record) if noted is not None else None

    def write(self, record: Record) -> None:
        self._notes.write(WANTED, msgspec.json.encode(record))

    async def kept(self) -> None:
        """Returns when what was written is sure to be found."""
        await self._notes.kept()
