"""What a sweep found, as one tidy list of runs: a deployment at a rate, its figures, and whether they count.

Reads the folder of `epd-bench layouts`, whole or interrupted; what is missing of it is a gap, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from bench.analysis.results import LoadedRun, Result, by_run, read_result
from bench.phases import Breakdown, RequestPhases, breakdown
from bench.record import read_json, read_lines
from bench.sweep.deployments import Deployment
from bench.sweep.experiment import Experiment
from bench.sweep.store import EXPERIMENT, PHASES, RESULT, ResultStore
from epd_serve.errors import ConfigError


class Row(msgspec.Struct):
    """Of a run in the result. `rate`: in the terms in which rates were asked."""

    run: str
    rate: float
    valid: bool
    grows: str
    objections: list[str]


@dataclass(frozen=True, eq=False)
class Run(LoadedRun):
    """One deployment at one rate.

    Attributes:
        row: its row in the result.
        phases: mean times of its requests; None where none was traced.
    """

    deployment: Deployment
    row: Row
    phases: Breakdown | None

    @property
    def roles(self) -> list[str]:
        """Whose batches were sampled, in the order of the stages: a fused instance is where its last stage is."""
        found = {name.split("/")[1] for name in self.figures if name.startswith("batch/")}
        return sorted(found, key=lambda role: ("EPD".find(role[-1]), role))

    @property
    def rate(self) -> float:
        return self.row.rate

    @property
    def begun_s(self) -> float:
        """When its first request was due."""
        return self.requests[0].due_s if self.requests else 0.0

    @property
    def valid(self) -> bool:
        """It says something about the server; `row.objections` says why not."""
        return self.row.valid


@dataclass(frozen=True, eq=False)
class SweepResults:
    """What was asked, and what there is of it.

    Attributes:
        gaps: what is missing of it, or does not count: lines of a table, by column.
        envs: by deployment, the environment in which it was measured.
    """

    folder: Path
    experiment: Experiment
    runs: Sequence[Run]
    gaps: Sequence[Mapping[str, str | float | None]]
    envs: Mapping[str, Mapping[str, Any]]

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """All rates of which any deployment has a run, ascending."""
        return tuple(sorted({run.rate for run in self.runs}))

    def of(self, deployment: Deployment) -> list[Run]:
        """Its runs by rate."""
        return sorted((run for run in self.runs if run.deployment == deployment), key=lambda run: run.rate)

    def at(self, deployment: Deployment, rate: float) -> Run | None:
        """The deployment's valid run at `rate`."""
        return next((run for run in self.of(deployment) if run.rate == rate and run.valid), None)


def read_sweep(folder: Path) -> SweepResults:
    """The sweep in `folder`.

    Raises:
        ConfigError: it is no such folder, or a file in it is broken; with the file, the line and what it lacks.
    """
    if not (folder / EXPERIMENT).is_file():
        raise ConfigError(
            f"{folder} has no {EXPERIMENT}: name the folder that `epd-bench layouts --out` wrote", param="DIR"
        )
    experiment = read_json(folder / EXPERIMENT, Experiment)
    runs: list[Run] = []
    gaps: list[tuple[str, float | None, str, str]] = []
    envs: dict[str, Mapping[str, Any]] = {}
    for one in experiment.deployments:
        store = ResultStore(folder / one.slug, one)
        own: list[Run] = []
        if (store.folder / RESULT).is_file():
            result = read_result(store.folder / RESULT)
            own, envs[one.name] = _runs(one, result), result.env
            if result.env.get("deployment", {}).get("devices_share_cores"):
                gaps.append((one.name, None, "devices share cores", ""))
        runs += own
        gaps += [(one.name, run.rate, "not measured", store.failure) for run in store.missing(experiment)]
        gaps += [(one.name, run.rate, "not valid", "; ".join(run.row.objections)) for run in own if not run.valid]
        gaps += [(one.name, run.rate, "no steady state", run.row.grows) for run in own if run.row.grows]
    columns = ("deployment", experiment.rate_axis, "what", "why")
    return SweepResults(folder, experiment, runs, [dict(zip(columns, gap, strict=True)) for gap in gaps], envs)


def _runs(deployment: Deployment, result: Result) -> list[Run]:
    path = result.path.with_name(PHASES)
    traced = by_run(read_lines(path, RequestPhases) if path.is_file() else [], lambda one: one.run)
    found = []
    for plain in result.rows:
        try:
            row = msgspec.convert(plain, Row)
            one = result.runs[row.run]
        except (msgspec.ValidationError, KeyError) as error:
            raise ConfigError(f"{result.path} has a row that is no run of a sweep: {error}") from None
        phases = breakdown(traced.get(row.run, ()))
        found.append(Run(one.figures, one.requests, deployment.devices, deployment, row, phases))
    return found
