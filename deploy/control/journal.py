"""What has to survive the controller: `<run>/wanted.json`, a few lines, replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from deploy.change.types import Kind

DEPTH = 16
"""Layouts that are remembered for `undo`."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    layouts: that were wanted, the present one last.
    required: kinds of requests that the change under way must go on serving; empty while none is.
    unwanted: ids of instances that are to be replaced although their like is wanted.
    paused_until: seconds since the epoch, 0 while requests do not wait.
    """

    layouts: tuple[str, ...]
    required: tuple[Kind, ...] = ()
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
