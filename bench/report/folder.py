"""Reads the results folder of `epd-bench layouts`, whole or interrupted; what is missing of it is said, not raised.

    experiment.json       what was asked, and of which entries
    <slug>/result.json    an entry's figures, environment and runs (`bench/record.py`); named by `env["entry"]["name"]`
    <slug>/failed.json    why an entry was not measured to its end, where it was not
    <slug>/rows.jsonl     every request; <slug>/phases.jsonl where its time went; <slug>/batches.jsonl what stages ran

The large files are read by functions of their own, since a table needs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.client.row import Row
from bench.client.rows_file import read_rows
from bench.client.slo import PAPER, parse_slos
from bench.report.experiment import Entry, Experiment, Run, rate_of
from epd_serve.errors import ConfigError

ASKED, RESULT, FAILED = "experiment.json", "result.json", "failed.json"
ROWS, PHASES, BATCHES = "rows.jsonl", "phases.jsonl", "batches.jsonl"
PARTS = frozenset({"figures", "env", "rows"})
"""Of a result."""
_Line = TypeVar("_Line")


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """Where the time to first token of one request went: milliseconds by phase (`bench/phases.py`)."""

    id: str
    run: str
    path: str
    phases_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BatchSample:
    """What an instance ran at one time of a run. `t_s` counts on CLOCK_MONOTONIC, as rows do."""

    run: str
    t_s: float
    instance: str
    role: str
    running: int
    waiting: int


def read(folder: Path) -> Experiment:
    """The experiment in `folder`.

    Raises:
        ConfigError: it is no such folder, or a file in it is broken; with the file, the line and what it lacks.
    """
    if not (folder / ASKED).is_file():
        raise ConfigError(f"{folder} has no {ASKED}: name the folder that `epd-bench layouts --out` wrote", param="DIR")
    asked = _object(folder / ASKED)
    results = {name: (path, found) for path, name, found in map(_result, sorted(folder.glob(f"*/{RESULT}")))}
    try:
        entries = tuple(_entry(one, results.get(str(one["name"]))) for one in asked["entries"])
        rates = tuple(float(rate) for rate in asked.get("rates") or ())
        slos = parse_slos(",".join(asked["slos"])) if asked.get("slos") else PAPER
        experiment = Experiment(
            folder=folder,
            kind=str(asked["kind"]),
            workload=_words(asked.get("workload", "unknown")),
            rates=rates,
            per_device=asked.get("rates_are", "total") == "per_device",
            slos=slos,
            entries=entries,
            asked=asked,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / ASKED} is no experiment: {_fault(error)}", param="DIR") from None
    return _with_problems(experiment, results)


def rows(entry: Entry) -> list[Row]:
    """Every request of the entry; none where there is no such file. Raises ConfigError naming file and line."""
    path = _file(entry, ROWS)
    return read_rows(path) if path else []


def phases(entry: Entry) -> list[RequestPhases]:
    """Of each request that was traced; none where it was not."""

    def one(plain: Mapping[str, Any]) -> RequestPhases:
        taken = {str(name): float(ms) for name, ms in plain["phases_ms"].items()}
        return RequestPhases(str(plain["id"]), str(plain["run"]), str(plain.get("path", "")), taken)

    return _lines(_file(entry, PHASES), one, "phases of a request")


def batches(entry: Entry) -> list[BatchSample]:
    """What the entry's stages ran while they were loaded; none where it was not sampled."""

    def one(plain: Mapping[str, Any]) -> BatchSample:
        run, instance, role = str(plain["run"]), str(plain["instance"]), str(plain["role"])
        return BatchSample(run, float(plain["t_s"]), instance, role, int(plain["running"]), int(plain["waiting"]))

    return _lines(_file(entry, BATCHES), one, "sample of a batch")


def _entry(one: Mapping[str, Any], found: tuple[Path, Mapping[str, Any]] | None) -> Entry:
    devices = int(one["devices"])
    if devices < 1:
        raise ValueError(f"entry {one['name']!r} has devices {devices}")
    layout, flags = str(one.get("layout") or one["name"]), tuple(str(flag) for flag in one.get("flags") or ())
    if found is None:
        return Entry(str(one["name"]), layout, devices, bool(one.get("baseline", False)), flags)
    path, result = found
    return Entry(
        name=str(one["name"]),
        layout=layout,
        devices=devices,
        baseline=bool(one.get("baseline", False)),
        flags=flags,
        folder=path.parent,
        env=result["env"],
        runs=tuple(_run(path, row) for row in result["rows"]),
        figures=result["figures"],
    )


def _run(path: Path, row: Mapping[str, Any]) -> Run:
    try:
        label, valid = str(row["run"]), bool(row["valid"])
        objections = tuple(str(text) for text in row.get("objections", ()))
        rate = row.get("rate_rps")
        return Run(
            label, rate_of(label) if rate is None else float(rate), valid, objections, str(row.get("grows", "")), row
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a row that is no run of a load: {_fault(error)}") from None


def _result(path: Path) -> tuple[Path, str, Mapping[str, Any]]:
    """(path, entry's name, result)."""
    found = _object(path)
    try:
        if not found.keys() >= PARTS:
            raise KeyError(min(PARTS - found.keys()))
        return path, str(found["env"]["entry"]["name"]), found
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of an entry: {_fault(error)}") from None


def _failure(path: Path) -> tuple[str, str]:
    """(entry's name, why it was not measured to its end)."""
    found = _object(path)
    return str(found.get("entry", "")), " ".join(str(found.get("reason", "no reason given")).split())


def _with_problems(experiment: Experiment, results: Mapping[str, Any]) -> Experiment:
    """The experiment, with what is missing of it in words."""
    problems = []
    failures = dict(_failure(path) for path in sorted(experiment.folder.glob(f"*/{FAILED}")))
    for entry in experiment.entries:
        done = {experiment.rate(entry, run) for run in entry.runs}
        absent = [rate for rate in experiment.rates if rate not in done]
        reason = failures.get(entry.name, "")
        if reason:
            problems.append(f"{entry.name}: ended early: {reason}")
        if entry.folder is None:
            problems.append(f"{entry.name}: was not measured")
        elif absent and len(absent) < len(experiment.rates):
            problems.append(f"{entry.name}: was not measured at {', '.join(f'{rate:g}' for rate in absent)} req/s")
        elif absent:
            problems.append(f"{entry.name}: was started, and not measured at any rate")
    known = {entry.name for entry in experiment.entries}
    problems += [f"{name}: has a result, and is no entry of {ASKED}: left out" for name in results if name not in known]
    return replace(experiment, problems=tuple(problems))


def _file(entry: Entry, name: str) -> Path | None:
    path = None if entry.folder is None else entry.folder / name
    return path if path is not None and path.is_file() else None


def _object(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno} is no JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return found


def _lines(path: Path | None, one: Callable[[Mapping[str, Any]], _Line], what: str) -> list[_Line]:
    """A line each; half a line at the end is left out, since a killed run leaves one."""
    if path is None:
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(one(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}:{number} is no {what}: {_fault(error)}") from None
    return found


def _words(value: Any) -> str:
    """A workload, however it was written down."""
    if isinstance(value, Mapping):
        return str(value.get("name") or json.dumps(value, sort_keys=True))
    return str(value)


def _fault(error: Exception) -> str:
    return f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
