"""Logs of a run directory: their size is bounded, and they are read piece by piece.

Who writes a log has it open for as long as it lives, and appends. So what a log has too much becomes a hole at its
beginning: nothing that is written meanwhile is lost, and every position in it stays what it was.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)
PIECE_BYTES = 64 << 10
KEPT_BYTES = 16 << 20
"""The end of each log that is kept for sure. It takes twice as much at most, and what is written between two looks."""

LOOK_S = 5.0
PAGE_BYTES = 4096
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


async def keep_bounded(folder: Path) -> None:
    """All logs of it, until cancelled."""
    while True:
        await asyncio.to_thread(_bound_all, folder)
        await asyncio.sleep(LOOK_S)


def _bound_all(folder: Path) -> None:
    for path in folder.glob("*.log"):
        try:
            bound_log(path)
        except FileNotFoundError:
            continue  # the run has ended
        except OSError as error:
            logger.warning("%s is not kept small: %s", path, error)


def bound_log(path: Path, kept_bytes: int = KEPT_BYTES) -> None:
    """Give back the room of a log that takes twice as much, but for its end. Raises OSError."""
    with path.open("r+b") as file:
        found = os.fstat(file.fileno())
        gone = (found.st_size - kept_bytes) // PAGE_BYTES * PAGE_BYTES
        if found.st_blocks * 512 <= 2 * kept_bytes or gone <= 0:
            return
        size = ctypes.c_int64(gone)
        if _libc.fallocate(file.fileno(), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0), size) != 0:
            failed = ctypes.get_errno()
            if failed not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(failed, os.strerror(failed), str(path))
            file.truncate(0)  # a file system without holes


def read_log(path: Path, offset: int, most_bytes: int = PIECE_BYTES) -> tuple[bytes, int]:
    """A piece of a log from there on, and where it ends. A negative offset is one from its end.

    What is not kept any more is skipped, to the next beginning of a line. A log that has become shorter is another one,
    and is read from its beginning; one that is not there is empty.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            asked = max(0, size + offset) if offset < 0 else offset if offset <= size else 0
            start = _kept_from(file, asked, size)
            file.seek(start)
            data = file.read(most_bytes)
    except FileNotFoundError:
        return b"", 0
    return data if start == asked else data[data.find(b"\n") + 1 :], start + len(data)


def _kept_from(file: BinaryIO, offset: int, size: int) -> int:
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError:  # there is nothing more
        return size
