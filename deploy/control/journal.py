"""What has to survive the controller: `<run>/wanted.json`, a few lines, replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from deploy.change.types import Kind
from deploy.control.progress import Change, State

DEPTH = 16
"""Layouts that are remembered for `undo`."""


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The latest change, under way or over, as `Change` has it; its steps are not kept.

    Attributes:
        began: of the monotonic clock, which is the machine's.
    """

    number: int
    what: str
    before: str
    layout: str
    pause_s: float
    required: tuple[Kind, ...]
    state: State
    reason: str
    began: float
    seconds: float | None
    paused_s: float
    cut: int

    @classmethod
    def of(cls, change: Change) -> Latest:
        values = {name: getattr(change, name) for name in cls.__struct_fields__}
        return cls(**{**values, "required": tuple(sorted(change.required))})

    def change(self) -> Change:
        """It goes on. What is late in it is so from now on."""
        values = msgspec.structs.asdict(self)
        return Change(**{**values, "required": frozenset(self.required)})


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
    """One file. Writes are few and small, and replace it at once: whoever reads it finds an old record or a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Record | None:
        """The last record; None before the first.

        Raises:
            msgspec.DecodeError: somebody else wrote there.
        """
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None

    def write(self, record: Record) -> None:
        unnamed = self._path.with_name(f".{self._path.name}")
        unnamed.write_bytes(msgspec.json.encode(record))
        os.replace(unnamed, self._path)
