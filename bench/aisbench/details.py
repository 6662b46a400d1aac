"""What a run of AISBench left on disk, as it stands there: each request, and the figures that it computed itself.

A request is a line of `*_details.jsonl`; the times of its chunks are a `.npy` blob in an SQLite file that the line
names. Blobs are read as plain arrays, never unpickled. A run that was ended early has its files under `tmp/` instead,
and what is there is read too. Exit code and files of AISBench look alike whether requests failed or not: rows decide.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from epd_serve.errors import StageError

NAME = "epd_bench"
"""Of the model entry, and of the folder of its results."""
DATASET_NAME = "mm_custom"
LONGEST_SAID = 500
_ERROR = re.compile(r"^(?:\S+\.)?(\w*(?:Error|Exception)): (.+)$", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Details(msgspec.Struct):
    """A line, but for what is sent and answered, which is long.

    Attributes:
        id: the row of the export. times: reference to its chunks. db_name: file that has them.
    """

    id: int
    success: bool
    error_info: str | None = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    uuid: str = ""
    db_name: str = ""
    time_points: dict[str, Any] | None = None


@dataclass(frozen=True)
class Sent:
    """One request as AISBench saw it.

    Attributes:
        row: of the export; 0 is the warm-up's. uuid: AISBench's name for it.
        chunks_s: when it was sent and when each chunk of the answer came, seconds of CLOCK_MONOTONIC; empty where the
            request broke.
        success: as AISBench sees it. error: what it says went wrong.
    """

    row: int
    uuid: str
    success: bool
    error: str
    input_tokens: int
    output_tokens: int
    chunks_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float | None:
        """As AISBench defines it: from sending to the first chunk, whatever is in that."""
        return self.chunks_s[1] - self.chunks_s[0] if len(self.chunks_s) > 1 else None


_decode = msgspec.json.Decoder(Details).decode


def results_folder(work_dir: Path) -> Path:
    """`performances/NAME` of the newest run in AISBench's work directory. Raises StageError where there is none."""
    runs = sorted(work_dir.glob(f"*/performances/{NAME}"))
    if not runs:
        raise StageError("AISBench did not come to send anything", stage="AISBench")
    return runs[-1]


def read_requests(folder: Path) -> list[Sent]:
    """The requests of a run, by row.

    Raises:
        StageError: there are none, or a file is not as AISBench writes it; with its name.
    """
    lines = sorted(folder.glob(f"{DATASET_NAME}_details.jsonl")) or sorted(folder.glob("tmp/*.jsonl"))
    blobs = cache(partial(_blobs, folder))
    found: dict[int, Sent] = {}
    for where, details in (line for path in lines for line in _lines(path)):
        number = (details.time_points or {}).get("__db_ref__")
        blob = None if number is None or not details.db_name else blobs(details.db_name, where).get(number)
        found[details.id] = Sent(
            row=details.id,
            uuid=details.uuid,
            success=details.success,
            error=_COLOUR.sub("", details.error_info or "")[:LONGEST_SAID],
            input_tokens=details.input_tokens or 0,
            output_tokens=details.output_tokens or 0,
            chunks_s=() if blob is None else _times(blob, where),
        )
    if not found:
        raise StageError(f"AISBench left no request in {folder}", stage="AISBench")
    return [found[row] for row in sorted(found)]


def own_figures(folder: Path) -> dict[str, float]:
    """What AISBench computed of the whole run: `TTFT/Average` in its units (milliseconds, tokens per second), by name.

    Empty where it did not come to that. Its figures count the warm-up's row too, and successes as it sees them.

    Raises:
        StageError: its files are not as it writes them.
    """
    table, totals = folder / f"{DATASET_NAME}.csv", folder / f"{DATASET_NAME}.json"
    found: dict[str, float] = {}
    try:
        if table.is_file():
            with table.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    name = row.pop("Performance Parameters")
                    found |= {f"{name}/{column}": number for column, number in _numbers(row)}
        if totals.is_file():
            for name, stages in json.loads(totals.read_text(encoding="utf-8")).items():
                found.update((name, number) for _, number in _numbers(stages))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError(f"{folder}: AISBench's figures cannot be read: {error!r}", stage="AISBench") from error
    return found


def said(*logs: Path) -> str:
    """The last error that AISBench's logs tell, without its colours and links; "" where they tell none."""
    found = ""
    for path in logs:
        if not path.is_file():
            continue
        text = _COLOUR.sub("", path.read_text(encoding="utf-8", errors="replace"))
        for _, message in _ERROR.findall(text):
            found = message.split(" | Visit ")[0]
    return found[:LONGEST_SAID]


def _blobs(folder: Path, name: str, where: str) -> Mapping[int, bytes]:
    """The times of chunks in a file, by number; none where the run ended before they were written."""
    if name != Path(name).name:
        raise _wrong(where, f"{name!r} is no name of a file")
    whole, draft = folder / "db_data" / name, folder / "tmp" / f"tmp_{name}"
    path = whole if whole.is_file() else draft
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
            return dict(file.execute("SELECT id, arr_blob FROM numpy_store").fetchall())
    except sqlite3.Error as error:
        if path == draft:  # not there, or left open by a process that was killed
            return {}
        raise _wrong(where, f"{name} cannot be read ({error})") from error


def _times(blob: bytes, where: str) -> tuple[float, ...]:
    """Of the chunks of one answer."""
    try:
        times = np.load(io.BytesIO(blob), allow_pickle=False)
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise _wrong(where, f"its times are no array ({error})") from error
    if times.ndim != 1 or times.dtype.kind != "f" or not np.isfinite(times).all() or (np.diff(times) < 0).any():
        raise _wrong(where, f"its times are an array of {times.dtype} that is no sequence of times")
    return tuple(times.tolist())


def _lines(path: Path) -> Iterator[tuple[str, Details]]:
    """(where it stands, the line). Half a line at the end, of a run that was killed, is left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield f"{path}:{number}", _decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise _wrong(f"{path}:{number}", f"{error}") from None
    except OSError as error:
        raise _wrong(str(path), error.strerror or str(error)) from error


def _numbers(columns: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Of values as `56.8 ms`; words are none."""
    for name, value in columns.items():
        if (match := _NUMBER.match(str(value))) is not None:
            yield name, float(match[0])


def _wrong(where: str, what: str) -> StageError:
    return StageError(f"{where} is not as AISBench writes it: {what}", stage="AISBench")
