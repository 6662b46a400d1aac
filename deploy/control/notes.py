"""What has to survive the controller, under names: a few lines each, replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Notes(Protocol):
    """Whoever reads finds an old content or a new one."""

    def read(self, name: str) -> bytes | None:
        """The last content; None before the first."""

    def write(self, name: str, content: bytes) -> None:
        """At once or soon; of several contents that wait the newest is enough."""

    async def kept(self) -> None:
        """Returns when what was written before is sure to be found."""


class FileNotes:
    """Files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        unnamed = self._folder / f".{name}"
        unnamed.write_bytes(content)
        os.replace(unnamed, self._folder / name)

    async def kept(self) -> None:
        """They are."""
