"""What an export leaves: its files, what to run with them, and what its client cannot keep of the workload."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.workloads.arrivals import Arrivals
from epd_serve.errors import ConfigError

REQUESTS = "requests.jsonl"
"""In the directory of every export, one line per request."""


@dataclass(frozen=True)
class Exported:
    """
    Attributes:
        requests: of the workload, without rows that an export adds.
        command: the client's own, with a server on port 8000 that the user replaces.
        notes: what gets lost or has to be known, in sentences.
    """

    requests: int
    files: tuple[Path, ...]
    command: str
    notes: tuple[str, ...] = ()


class Write(Protocol):
    """Adds a row."""

    def __call__(self, row: Mapping[str, Any]) -> None: ...


@contextlib.contextmanager
def rows_to(directory: Path) -> Iterator[tuple[Path, Write]]:
    """The directory's `REQUESTS`, written row by row; it has its name only when it is complete.

    Raises:
        ConfigError: the directory cannot be written (disk full, no permission, a file in its place). What was written
            of the rows is removed.
    """
    path = directory / REQUESTS
    draft = path.with_suffix(".draft")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:

            def write(row: Mapping[str, Any]) -> None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

            yield path, write
        draft.replace(path)
    except OSError as error:
        raise unwritable(directory, error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """The one message for an export that cannot be written."""
    return ConfigError(
        f"{directory} cannot be written: {error.strerror or error}: free some space, or export to another directory",
        param="--export",
    )


def milliseconds(arrival_s: float) -> int:
    return round(arrival_s * 1000)


def in_words(arrivals: Arrivals | None) -> str:
    """For notes."""
    return "no arrival times" if arrivals is None else str(arrivals)
