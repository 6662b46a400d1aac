"""What runs leave and go on from: a result with a row per run (`bench/record.py`), and lines of JSON beside it.

A run is finished when its row is in the result, which is replaced whole, and it was not cut short. What an unfinished
one left in the other files stays until it is measured again, from its first request.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import Record, read_json, write, write_whole
from epd_serve.errors import ConfigError

SESSION = ("command", "commit", "uncommitted_changes", "date", "machine", "versions")
"""Of an environment, what may differ between the sessions in which the runs were measured."""


class Results:
    """The runs of one server so far.

    Args:
        path: of the result; None: it is not kept. Those in it are taken over where `resume`.
        beside: the files with lines of the runs. flag: what all of it belongs to, in errors.

    Attributes:
        figures, env, rows: as the result has them.

    Raises:
        ConfigError: what is there is no result of such runs.
    """

    def __init__(self, path: Path | None, beside: Sequence[Path] = (), *, flag: str, resume: bool) -> None:
        self.path, self._beside, self._flag = path, beside, flag
        self.figures: dict[str, float] = {}
        self.env: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        if path is None or not resume or not path.exists():
            return
        found = read_json(path, Record)
        self.env, self.rows = found.env, [row for row in found.rows if not row.get("stopped")]
        self.figures = {name: value for name, value in found.figures.items() if name.split("/")[0] in self.finished}

    @property
    def finished(self) -> set[str]:
        """Labels of the runs that are."""
        return {str(row["run"]) for row in self.rows}

    def begin(self, env: Mapping[str, Any]) -> None:
        """A session of measuring begins: what unfinished runs left goes. Raises ConfigError where it cannot."""
        for path in self._beside:
            keep_runs(path, self.finished, self._flag)
        session = {name: env.get(name) for name in SESSION} | {"finished_before": sorted(self.finished)}
        self.env = {**env, "sessions": [*self.env.get("sessions", ()), session]}

    def keep(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """A run has ended. Raises ConfigError where the disk is full or gone; the file is then as it was."""
        self.figures |= figures
        self.rows.append(dict(row))
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write(self.path, self.figures, self.env, self.rows, self._flag)


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field in which two experiments differ, with both values; "" where they are one."""

    def shown(value: Any) -> str:
        return "not given" if value is None else value if isinstance(value, str) else json.dumps(value)

    for name in dict.fromkeys([*now, *before]):
        if before.get(name) != now.get(name):
            return f"{name} was {shown(before.get(name))}, is {shown(now.get(name))}"
    return ""


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]], flag: str) -> None:
    """JSON, a line each. Raises ConfigError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror}", param=flag) from error


def keep_runs(path: Path, runs: Collection[str], flag: str) -> None:
    """Leave those JSON lines of a file that belong to these runs, where it is there. Raises ConfigError."""
    if not path.is_file():
        return
    kept = [line for line in path.read_bytes().split(b"\n")[:-1] if _run_of(line) in runs]
    write_whole(path, b"".join(line + b"\n" for line in kept), flag)


def _run_of(line: bytes) -> object:
    """Of a line that is no row: None."""
    try:
        return json.loads(line)["run"]
    except (ValueError, KeyError, TypeError):
        return None
