"""Results as they are compared: read from a file, from the folder of one entry, or from a folder of many.

Owns the finding and reading. A result has the shape of `bench/record.py`; the rows of its requests lie beside it, as
`NAME.rows.jsonl` (`epd-bench load`) or `rows.jsonl` (`epd-bench layouts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.client.row import Row
from bench.client.rows_file import read_rows
from epd_serve.errors import ConfigError

EXPERIMENT = ("workload", "knobs", "arrivals", "seconds", "n", "seed", "slos")
"""Fields of a folder's experiment that have to be equal for its entries to be compared with others."""


@dataclass(frozen=True)
class Result:
    """One result. `name`: of the entry in a folder of many, "" of one alone. `requests`: empty where none were kept."""

    name: str
    path: Path
    figures: Mapping[str, float]
    env: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    requests: Sequence[Row] = ()

    @property
    def devices(self) -> int | None:
        """That served it, where the result says."""
        for part in ("load", "entry"):
            found = (self.env.get(part) or {}).get("devices")
            if isinstance(found, int) and found > 0:
                return found
        return None

    @property
    def kind(self) -> str:
        return str(self.env.get("kind", "unknown"))


def read_results(path: Path) -> list[Result]:
    """The result in a file, or those of a folder.

    Raises:
        ConfigError: nothing is there, or it is no result; names the path.
    """
    if path.is_file():
        return [_read(path, "")]
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder; give a result (--json FILE) or a folder of them")
    if (path / "rows.jsonl").is_file() and (path / "result.json").is_file():
        return [_read(path / "result.json", "")]
    entries = sorted(path.glob("*/result.json"))
    if entries:
        found = [_read(one, one.parent.name) for one in entries]
        whole = path / "result.json"
        if whole.is_file():
            found += _derived(_read(whole, "all entries"), found)
        return found
    files = [one for one in sorted(path.glob("*.json")) if _is_result(one)]
    if not files:
        raise ConfigError(f"{path} has no results: neither */result.json nor *.json of an epd-bench measurement")
    return [_read(one, one.stem) for one in files]


def _derived(whole: Result, entries: Sequence[Result]) -> list[Result]:
    """What a folder's own result says beyond its entries'."""
    names = tuple(f"{one.name}/" for one in entries)
    figures = {name: value for name, value in whole.figures.items() if not name.startswith(names)}
    return [Result(whole.name, whole.path, figures, whole.env, ())] if figures else []


def _read(path: Path, name: str) -> Result:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        figures, env, rows = found["figures"], found["env"], found["rows"]
        if not (isinstance(figures, dict) and isinstance(env, dict) and isinstance(rows, list)):
            raise TypeError("figures, env or rows are of another kind")
        wrong = [key for key, value in figures.items() if isinstance(value, bool) or not isinstance(value, int | float)]
        if wrong:
            raise TypeError(f"figure {wrong[0]} is no number")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of epd-bench: {error}") from None
    entry = env.get("entry")
    named = str(entry["name"]) if name and isinstance(entry, dict) and "name" in entry else name
    return Result(named, path, figures, _with_experiment(path, env), rows, _requests(path))


def _with_experiment(path: Path, env: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `epd-bench layouts` was asked of all entries is in the folder's own file: with it, as of a load."""
    file, load = path.parent.parent / "experiment.json", env.get("load")
    if path.name != "result.json" or not isinstance(load, Mapping) or not file.is_file():
        return env
    try:
        asked = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(asked, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return {**env, "load": {**load, **{name: asked[name] for name in EXPERIMENT if name in asked}}}


def _requests(path: Path) -> Sequence[Row]:
    beside = [path.with_suffix(".rows.jsonl")]
    if path.name == "result.json":
        beside.append(path.with_name("rows.jsonl"))
    return next((read_rows(one) for one in beside if one.is_file()), ())


def _is_result(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"figures", "env", "rows"} <= found.keys()
