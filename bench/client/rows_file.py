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
    """Appends rows to a new file, or to what is there. Use as a context manager.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._path = path
        self._kept = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            begin = os.O_APPEND if append else os.O_TRUNC
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | begin | os.O_CLOEXEC, 0o644)
            self._nbytes = os.lseek(self._fd, 0, os.SEEK_END) if append else 0
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
