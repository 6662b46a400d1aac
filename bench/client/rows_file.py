"""Rows on disk: one JSON line each, written as it comes, so that whatever ends a run, what was measured is there."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import TracebackType

from bench.client.row import Row
from epd_serve.errors import ConfigError


class RowsFile:
    """Appends rows to a new file, or to one that is there. Use as a context manager.

    Args:
        fresh: what the file held is lost.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, path: Path, *, fresh: bool = True) -> None:
        self._path = path
        self._kept = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if fresh else os.O_APPEND)
            self._fd = os.open(path, flags, 0o644)
            self._nbytes = os.fstat(self._fd).st_size
        except OSError as error:
            raise ConfigError(f"--rows {path} cannot be written: {error.strerror}", param="--rows") from error

    def __enter__(self) -> RowsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def keep(self, row: Row) -> None:
        """Write `row`, whole or not at all. Raises ConfigError where the disk is full or gone."""
        line = json.dumps(row.to_json(), separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                os.write(self._fd, line[written:])  # says why there was no room for it
        except OSError as error:
            with contextlib.suppress(OSError):  # not of every file; `read_rows` leaves out half a line
                os.ftruncate(self._fd, self._nbytes)
            raise ConfigError(
                f"--rows {self._path}: {error.strerror}; {self._kept} rows are kept", param="--rows"
            ) from error
        self._nbytes += len(line)
        self._kept += 1


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; half a line at its end is left out.

    Raises:
        ConfigError: it cannot be read, or has a line that is no row.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(Row.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is no row of a load: {error!r}") from None
    return rows
