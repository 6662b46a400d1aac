"""Logs of a run directory, read piece by piece."""

from __future__ import annotations

import os
from pathlib import Path

PIECE_BYTES = 64 << 10


def read_log(path: Path, offset: int) -> tuple[bytes, int]:
    """A piece of a log from there on, and where it ends. A negative offset is one from its end.

    A log that has become shorter is another one, and is read from its beginning; one that is not there is empty.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size + offset) if offset < 0 else offset if offset <= size else 0
            file.seek(start)
            data = file.read(PIECE_BYTES)
    except FileNotFoundError:
        return b"", 0
    return data, start + len(data)
