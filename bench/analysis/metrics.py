"""What deployments are compared by, as TTFT and attainment; and whether more of a figure is better. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from bench.analysis.sweep_results import Run, SweepResults
from bench.clients.slo import Slo

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


@dataclass(frozen=True)
class Metric:
    """A number of a run, and how it is shown.

    Attributes:
        name, unit: as axes and columns have them.
        figure: where it lies in the run's figures.
        percent: a share, shown in percent.
    """

    name: str
    unit: str
    figure: str
    percent: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})"

    @property
    def lower_is_better(self) -> bool:
        return better(self.figure) == "lower"

    def of(self, run: Run) -> float | None:
        value = run.figure(self.figure)
        return value * 100.0 if value is not None and self.percent else value


TTFT, TTFT_P99 = Metric("mean TTFT", "ms", "ttft_ms/mean"), Metric("P99 TTFT", "ms", "ttft_ms/p99")
TPOT, TPOT_P99 = Metric("mean TPOT", "ms", "tpot_ms/mean"), Metric("P99 TPOT", "ms", "tpot_ms/p99")
THROUGHPUT = Metric("throughput", "output tokens/s", "output_tokens_per_s")
THROUGHPUT_PER_DEVICE = Metric("throughput per device", "output tokens/s", "output_tokens_per_s_per_device")

LATENCIES = (TTFT, TTFT_P99, TPOT, TPOT_P99)
RANKED = (TTFT, TPOT, THROUGHPUT_PER_DEVICE)
"""What EPD-Serve's Fig. 17 ranks by: throughput per device, so that those of more devices do not win by them."""


def attainment(slo: Slo) -> Metric:
    """Share of the requests within `slo`."""
    bounds = f"TTFT ≤ {slo.ttft_ms:g} ms, TPOT ≤ {slo.tpot_ms:g} ms"
    return Metric(f"SLO attainment, {bounds}", "%", f"slo_{slo}/attainment", percent=True)


def effective_per_device(slo: Slo) -> Metric:
    """Output tokens a second of requests within `slo`, per device (EPD-Serve Table 5)."""
    figure = f"slo_{slo}/effective_tokens_per_s_per_device"
    return Metric(f"effective throughput per device, {slo}", "output tokens/s", figure)


def compared_by(slo: Slo) -> tuple[Metric, ...]:
    """What the best deployments, and ratios, are told by."""
    return TTFT, TPOT, THROUGHPUT_PER_DEVICE, effective_per_device(slo)


def ranked(results: SweepResults, metric: Metric, rate: float, devices: int | None = None) -> list[tuple[Run, float]]:
    """Valid runs at `rate` that have the number, best first; equals in the order of the experiment.

    Args:
        devices: only deployments of so many.
    """
    runs = [results.at(one, rate) for one in results.experiment.deployments if devices in (None, one.devices)]
    found = [(run, value) for run in runs if run is not None and (value := metric.of(run)) is not None]
    return sorted(found, key=lambda one: one[1] if metric.lower_is_better else -one[1])


def ranks(results: SweepResults, metric: Metric, rate: float) -> dict[str, int]:
    """Rank by deployment's name, 1 the best; equals share the better rank. Runs that are not valid have none."""
    order = ranked(results, metric, rate)
    values = [value for _, value in order]
    return {run.deployment.name: values.index(value) + 1 for run, value in order}
