"""What a sweep found, as one tidy list of runs: a deployment at a rate, its figures, and whether they count.

Reads the folder of `epd-bench layouts`, whole or interrupted; what is missing of it is a gap, not an error. Of one with
a folder for each seed, a run has the medians of its figures over the seeds. Also what deployments are compared by, as
TTFT and attainment, and whether more of a figure is better.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from bench.analysis.results import LoadedRun, Result, by_run, read_result
from bench.clients.phases import Breakdown, RequestPhases, breakdown
from bench.record import read_lines
from bench.sweep.compared import over_seeds
from bench.sweep.experiment import Deployment, Experiment, read_experiment
from bench.sweep.store import EXPERIMENT, PHASES, RESULT, SEED, ResultStore
from epd_serve.errors import ConfigError
from epd_serve.slo import Slo


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
    def rate(self) -> float:
        return self.row.rate

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


def read_sweep(folder: Path) -> SweepResults:
    """The sweep in `folder`, of one seed or of several.

    Raises:
        ConfigError: it is no such folder, or a file in it is broken; with the file, the line and what it lacks.
    """
    if seeds := sorted(folder.glob(f"{SEED}*/{EXPERIMENT}")):
        return _over_seeds(folder, [read_sweep(one.parent) for one in seeds])
    if not (folder / EXPERIMENT).is_file():
        raise ConfigError(
            f"{folder} has no {EXPERIMENT}: name the folder that `epd-bench layouts --out` wrote", param="DIR"
        )
    experiment = read_experiment(folder / EXPERIMENT)
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


def _over_seeds(folder: Path, each: Sequence[SweepResults]) -> SweepResults:
    """A run of each deployment and rate that every seed has, valid where all are; single requests stay with the
    seeds."""
    runs = []
    for first in each[0].runs:
        same = [run for one in each for run in one.of(first.deployment) if run.rate == first.rate]
        if len(same) < len(each):
            continue
        row = next((run.row for run in same if not run.valid), first.row)
        figures = over_seeds([run.figures for run in same])
        runs.append(Run(figures, (), first.devices, first.deployment, row, None))
    gaps = [{**gap, "seed": one.experiment.seed} for one in each for gap in one.gaps]
    return SweepResults(folder, each[0].experiment, runs, gaps, each[0].envs)


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


Direction = Literal["higher", "lower", ""]

_NEITHER = re.compile(
    r"(^|/)(requests|requests_of_the_run|window_s|run_s|offered_rps|output_tokens_mean|prompt_tokens_mean|stages|joined"
    r"|events_per_token|cancelled|seconds|kills|rounds|generator)(/|$)|(^|/)idle_|scheduling_ms|_p25$|_p75$"
)
_HIGHER = re.compile(
    r"attainment|goodput|(^|[/_])rps([/_]|$)|tokens_per_s|tput|throughput|per_core|overlap|gb_per_s|bandwidth"
    r"|same_tokens|(^|/)(ok|right)$|pictures_per_request|max_batch|kv_tokens"
)
_LOWER = re.compile(
    r"(ttft|tpot|itl|e2e|latency|added|exposed|late|wait|error|errors|memory|slowdown|encodes|residual|cpu)([/_]|$)"
    r"|_(ms|us|s|bytes|mib|kib|gib)(/|$)|(^|/)(error|truncated|timeout)$"
)


def better(figure: str) -> Direction:
    """`higher`, `lower` or "" by words of its path; what a rate or a share says goes before units of time.

    What nobody can call better or worse (how many requests there were, how long a run took) has no direction.
    """
    if _NEITHER.search(figure):
        return ""
    if _HIGHER.search(figure):
        return "higher"
    return "lower" if _LOWER.search(figure) else ""


class Metric(NamedTuple):
    """A number of a run: as axes and columns call it, and where it lies in the run's figures; shares are in percent."""

    name: str
    unit: str
    figure: str

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})"

    def of(self, run: Run) -> float | None:
        value = run.figure(self.figure)
        return value * 100.0 if value is not None and self.unit == "%" else value


TTFT, TTFT_P99 = Metric("mean TTFT", "ms", "ttft_ms/mean"), Metric("P99 TTFT", "ms", "ttft_ms/p99")
TPOT, TPOT_P99 = Metric("mean TPOT", "ms", "tpot_ms/mean"), Metric("P99 TPOT", "ms", "tpot_ms/p99")
THROUGHPUT = Metric("throughput", "output tokens/s", "output_tokens_per_s")
THROUGHPUT_PER_DEVICE = Metric("throughput per device", "output tokens/s", "output_tokens_per_s_per_device")


def attainment(slo: Slo) -> Metric:
    """Share of the requests within `slo`."""
    return Metric(f"SLO attainment, {slo.text}", "%", f"slo_{slo}/attainment")


def effective_per_device(slo: Slo) -> Metric:
    """Output tokens a second of requests within `slo`, per device (EPD-Serve Table 5)."""
    figure = f"slo_{slo}/effective_tokens_per_s_per_device"
    return Metric(f"effective throughput per device, {slo}", "output tokens/s", figure)
