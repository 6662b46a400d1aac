"""What a sweep found, as one tidy list of runs: a deployment at a rate, its figures, and whether they count.

Reads the folder of `epd-bench layouts`, whole or interrupted; what is missing of it is a gap, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.analysis.results import LoadedRun, Result, by_run, read_result
from bench.phases import Breakdown, breakdown, request_phases
from bench.record import read_object
from bench.statistic import percentile
from bench.sweep.deployments import Deployment
from bench.sweep.experiment import Experiment
from bench.sweep.store import BATCHES, EXPERIMENT, PHASES, RESULT, ResultStore
from epd_serve.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Batch:
    """What the instances of one role ran at once during a run, sampled.

    Attributes:
        mean, p10, p90: running sequences of one instance, of so many samples. waiting: mean.
    """

    role: str
    instances: int
    samples: int
    mean: float
    p10: float
    p90: float
    waiting: float


@dataclass(frozen=True, eq=False)
class Run(LoadedRun):
    """One deployment at one rate.

    Attributes:
        rate: in the terms in which rates were asked. row: its row in the result.
        batches: by role, in the order of the stages; empty where the stages were not sampled.
        phases: mean times of its requests; None where none was traced.
    """

    deployment: Deployment
    rate: float
    row: Mapping[str, Any]
    batches: Sequence[Batch]
    phases: Breakdown | None

    @property
    def begun_s(self) -> float:
        """When its first request was due."""
        return self.requests[0].due_s if self.requests else 0.0

    @property
    def valid(self) -> bool:
        """It says something about the server; `row["objections"]` says why not."""
        return bool(self.row["valid"])


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
    try:
        experiment = Experiment.from_json(read_object(folder / EXPERIMENT))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / EXPERIMENT} is no experiment: {error}", param="DIR") from None
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
        gaps += [(one.name, run.rate, "not valid", "; ".join(run.row["objections"])) for run in own if not run.valid]
        gaps += [(one.name, run.rate, "no steady state", run.row["grows"]) for run in own if run.row["grows"]]
    columns = ("deployment", experiment.rate_axis, "what", "why")
    return SweepResults(folder, experiment, runs, [dict(zip(columns, gap, strict=True)) for gap in gaps], envs)


def _runs(deployment: Deployment, result: Result) -> list[Run]:
    traced = by_run(result.lines(PHASES, request_phases), lambda one: one.run)
    sampled = by_run(result.lines(BATCHES, _sample), lambda one: str(one["run"]))
    found = []
    for row in result.rows:
        try:
            label, rate, _ = str(row["run"]), float(row["rate"]), (row["valid"], row["grows"], row["objections"])
            one = result.runs[label]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{result.path} has a row that is no run of a sweep: {error!r}") from None
        phases, batches = breakdown(traced.get(label, ())), _batches(sampled.get(label, ()))
        found.append(Run(one.figures, one.requests, deployment.devices, deployment, rate, row, batches, phases))
    return found


def _sample(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """A sample of an instance, checked."""
    return {name: kind(plain[name]) for name, kind in _SAMPLE.items()}


_SAMPLE = {"run": str, "instance": str, "role": str, "running": int, "waiting": int}


def _batches(samples: Sequence[Mapping[str, Any]]) -> list[Batch]:
    """By role: a fused instance is where its last stage is."""
    found = []
    for role in sorted({one["role"] for one in samples}, key=lambda role: ("EPD".find(role[-1:]), role)):
        own = [one for one in samples if one["role"] == role]
        running, waiting = ([float(one[name]) for one in own] for name in ("running", "waiting"))
        spread = fmean(running), percentile(running, 10), percentile(running, 90)
        found.append(Batch(role, len({one["instance"] for one in own}), len(own), *spread, fmean(waiting)))
    return found
