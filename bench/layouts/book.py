"""The files of one entry: which runs are finished, what they left, and why there are no more.

A run is finished when its row is in `result.json`, which is replaced whole. What an unfinished one left in the other
files stays until it is measured again.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.client.resume import keep_runs
from bench.layouts.entry import Entry
from bench.layouts.experiment import Planned
from bench.record import write
from epd_serve.errors import ConfigError

RESULT, ROWS, PHASES, BATCHES = "result.json", "rows.jsonl", "phases.jsonl", "batches.jsonl"
FAILED, ANSWERS = "failed.json", "answers.json"


class Book:
    """What there is of an entry.

    Attributes:
        figures, env, rows: of its result so far (`bench/record.py`), a row per finished run.
    """

    def __init__(self, folder: Path, entry: Entry) -> None:
        """Raises ConfigError where its result cannot be read."""
        self.folder, self.entry = folder, entry
        self.figures: dict[str, float] = {}
        self.env: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        if (folder / RESULT).exists():
            found = read_json(folder / RESULT)
            try:
                self.figures, self.env, self.rows = found["figures"], found["env"], found["rows"]
            except KeyError as error:
                raise ConfigError(f"{folder / RESULT} is no result: it has no {error}", param="--out") from None

    @property
    def finished(self) -> set[str]:
        """Labels of the runs that are."""
        return {str(row["run"]) for row in self.rows}

    def missing(self, runs: Sequence[Planned]) -> list[Planned]:
        """Those that are still to be made."""
        return [run for run in runs if run.label not in self.finished]

    def began(self, env: Mapping[str, Any]) -> None:
        """A session of measuring begins: what unfinished runs left goes, and why the last one failed."""
        for name in (ROWS, PHASES, BATCHES):
            keep_runs(self.folder / name, self.finished, "--out")
        sessions = [*self.env.get("sessions", ()), _session(env)]
        self.env = {**env, "sessions": sessions}
        with contextlib.suppress(FileNotFoundError):
            (self.folder / FAILED).unlink()

    def keep(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """A run is finished. Raises ConfigError where the disk is full or gone; the result is then as it was."""
        self.figures |= figures
        self.rows.append(dict(row))
        write_result(self.folder / RESULT, self.figures, self.env, self.rows)

    def note(self, name: str, value: float) -> None:
        """A figure of the entry itself, written with its next run."""
        self.figures[name] = value

    def failed(self, reason: str) -> None:
        """Why it has no more runs."""
        said = {"reason": reason, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        write_json(self.folder / FAILED, {"entry": self.entry.name, **said})

    @property
    def failure(self) -> str:
        """Of the last session; "" where there was none."""
        path = self.folder / FAILED
        return str(read_json(path).get("reason", "")) if path.exists() else ""

    @property
    def answers(self) -> list[list[int]]:
        """Token ids of the requests that every entry answers; empty before it has."""
        path = self.folder / ANSWERS
        return [list(map(int, one)) for one in read_json(path)["tokens"]] if path.exists() else []

    def keep_answers(self, tokens: Sequence[Sequence[int]]) -> None:
        write_json(self.folder / ANSWERS, {"tokens": [list(one) for one in tokens]})


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError where it cannot be read, or is no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): mend it, or begin anew with --fresh", param="--out"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object: mend it, or begin anew with --fresh", param="--out")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all. Raises ConfigError."""
    with _whole(path) as new:
        new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_result(
    path: Path, figures: Mapping[str, float], env: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """A result (`bench/record.py`), whole or not at all. Raises ConfigError."""
    try:
        write(path, figures, env, rows)
    except ConfigError as error:
        why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error.message
        raise ConfigError(f"--out: {path}: {why}; what was there before is kept", param="--out") from error


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to, which then takes the place of `path`."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield new
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise ConfigError(f"--out: {path}: {error.strerror}; what was there before is kept", param="--out") from error


def _session(env: Mapping[str, Any]) -> dict[str, Any]:
    """What may differ between the sessions of an entry."""
    said = {name: env.get(name) for name in ("command", "commit", "uncommitted_changes", "date")}
    return {**said, "load_average_1min": env.get("machine", {}).get("load_average_1min")}
