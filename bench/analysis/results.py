"""Results as they are analysed: one from a file, all of a folder, and what lies beside each.

A result has the shape of `bench/record.py`. The rows of its requests lie beside it, as `NAME.rows.jsonl`
(`epd-bench load`) or `rows.jsonl` (`epd-bench layouts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from bench.clients.results import RequestRecord, read_records
from bench.record import Record, read_json
from bench.sweep.experiment import read_asked
from bench.sweep.store import EXPERIMENT, RESULT, ROWS
from epd_serve.errors import ConfigError
from epd_serve.slo import MEAN

ASKED = ("workload", "knobs", "duration_s", "count", "seed", "slos")
"""Fields of a folder's experiment that have to be equal for its deployments to be compared with others."""
PER_DEVICE = "_per_device"
_UNJUDGED = re.compile(r"(slo_[^:/]+:[^:/]+)/")
"""Before objectives named their judge it was the mean."""
_Line = TypeVar("_Line")


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """One run of a load.

    Attributes:
        figures: flattened. requests: in the order in which they were due; empty where they were not kept.
        devices: that served it.
    """

    figures: Mapping[str, float]
    requests: Sequence[RequestRecord]
    devices: int

    def figure(self, name: str) -> float | None:
        """By name, as `ttft_ms/p99`; None where there is none. `NAME_per_device` is NAME over the devices."""
        whole = self.figures.get(name.removesuffix(PER_DEVICE))
        return whole if whole is None or not name.endswith(PER_DEVICE) else whole / self.devices


@dataclass(frozen=True, eq=False)
class Result:
    """One result.

    Attributes:
        name: of the deployment in a folder of many, "" of one alone.
        figures: flattened. rows: as the measurement kept them, one per run of a load.
    """

    name: str
    path: Path
    figures: Mapping[str, float]
    env: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def devices(self) -> int | None:
        """That served it, where the result says."""
        found = [(self.env.get(part) or {}).get("devices") for part in ("load", "deployment")]
        return next((devices for devices in found if isinstance(devices, int) and devices > 0), None)

    @property
    def kind(self) -> str:
        return str(self.env.get("kind", "unknown"))

    @cached_property
    def runs(self) -> Mapping[str, LoadedRun]:
        """The runs of a load by label; none of any other measurement."""
        labels = [str(row["run"]) for row in self.rows if {"run", "window_s"} <= row.keys()]
        beside = [self.path.with_suffix(".rows.jsonl")]
        beside += [self.path.with_name(ROWS)] if self.path.name == RESULT else []
        records = next((read_records(path) for path in beside if path.is_file()), []) if labels else []
        requests = by_run(sorted(records, key=lambda row: row.due_s), lambda row: row.run)
        return {label: LoadedRun(self.under(label), requests.get(label, []), self.devices or 1) for label in labels}

    def under(self, label: str) -> dict[str, float]:
        """The figures of a run, without its label."""
        prefix = f"{label}/"
        return {name.removeprefix(prefix): value for name, value in self.figures.items() if name.startswith(prefix)}


def by_run(lines: Iterable[_Line], run_of: Callable[[_Line], str]) -> dict[str, list[_Line]]:
    """The lines of each run."""
    found: dict[str, list[_Line]] = {}
    for line in lines:
        found.setdefault(run_of(line), []).append(line)
    return found


def read_results(path: Path) -> list[Result]:
    """The result in a file, or those of a folder.

    Raises:
        ConfigError: nothing is there, or it is no result; names the path.
    """
    if path.is_file():
        return [read_result(path)]
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder; give a result (--json FILE) or a folder of them")
    if (path / ROWS).is_file() and (path / RESULT).is_file():
        return [read_result(path / RESULT)]
    if deployments := sorted(path.glob(f"*/{RESULT}")):
        return [read_result(one, one.parent.name) for one in deployments]
    files = [
        one
        for one in sorted(path.glob("*.json"))
        if {"figures", "env", "rows"} <= read_json(one, dict[str, Any]).keys()
    ]
    if not files:
        raise ConfigError(f"{path} has no results: neither */{RESULT} nor *.json of an epd-bench measurement")
    return [read_result(one, one.stem) for one in files]


def read_result(path: Path, name: str = "") -> Result:
    """The result in a file.

    Args:
        name: of one among many; that of its deployment goes before it.

    Raises:
        ConfigError: it is none; names the path and what is wrong.
    """
    found = read_json(path, Record)
    env = found.env
    named = str(env.get("deployment", {}).get("name", name)) if name else ""
    asked = path.parent.parent / EXPERIMENT
    if path.name == RESULT and asked.is_file():  # what was asked of all deployments, as a load records it
        experiment = read_asked(asked)
        env["load"] = {**env.get("load", {}), **{field: experiment[field] for field in ASKED if field in experiment}}
    figures = {_UNJUDGED.sub(rf"\1:{MEAN}/", name): value for name, value in found.figures.items()}
    return Result(named, path, figures, env, found.rows)
