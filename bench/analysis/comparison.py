"""Deployments against each other: which of them is the monolith, and the ratio of one run to another. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from bench.analysis.intervals import ratio_interval
from bench.analysis.metrics import Metric, compared_by
from bench.analysis.samples import LoadedRuns
from bench.analysis.sweep_results import Run, SweepResults
from bench.sweep.deployments import Deployment
from epd_serve.layout_parser import parse
from epd_serve.roles import Role

NEGLIGIBLE = 0.02
"""Difference of a ratio from 1: with the same requests on both sides an interval may exclude 1 by nothing at all."""


def monolith(results: SweepResults) -> Deployment | None:
    """What the others are compared to: a baseline of whole instances, else any deployment of such.

    Of several the one whose device count the most deployments have. None where there is none that was measured.
    """
    counts = [one.devices for one in results.experiment.deployments]
    whole = [one for one in results.experiment.deployments if parse(one.layout).roles == {Role.EPD} and results.of(one)]
    return max(whole, key=lambda one: (one.baseline, counts.count(one.devices)), default=None)


def against_monolith(results: SweepResults, against: Deployment | None) -> Iterator[tuple[Metric, Run, Run]]:
    """(metric, run, the monolith's run at its rate) of every valid run that has both numbers."""
    for metric, run in product(compared_by(results.experiment.slos[0]), results.runs):
        base = results.at(against, run.rate) if against and run.valid and run.deployment != against else None
        if base and metric.of(run) is not None and metric.of(base):
            yield metric, run, base


def ratio_cells(metric: Metric, run: Run, base: Run | None, name: str) -> dict[str, str | float | None]:
    """The ratio of two runs, its interval (95 %), and whether the first is better: columns of a table.

    None where one has no such figure; without a verdict where the requests were not kept, or are too few.
    """
    titles = (name, f"{name}: from", f"{name}: to", f"{name}: is")
    value, reference = metric.of(run), metric.of(base) if base else None
    if base is None or value is None or not reference:
        return dict.fromkeys(titles)
    ratio, scale = value / reference, base.deployment.devices / run.deployment.devices if metric.per_device else 1.0
    low, high = interval(metric.figure, run, base) or (None, None)
    if low is None or high is None:
        return dict(zip(titles, (ratio, None, None, None), strict=True))
    low, high = low * scale, high * scale
    verdict = "better" if (ratio < 1.0) == metric.lower_is_better else "worse"
    if low <= 1.0 <= high or abs(ratio - 1.0) < NEGLIGIBLE:
        verdict = "not told apart"
    return dict(zip(titles, (ratio, low, high, verdict), strict=True))


def interval(figure: str, run: Run, base: Run) -> tuple[float, float] | None:
    """Of the ratio of a figure of two runs that both have it; None where their requests give none."""
    if not (run.requests and base.requests):
        return None
    windows_s = base.figure("window_s") or 0.0, run.figure("window_s") or 0.0
    recorded = base.figure(figure) or 0.0, run.figure(figure) or 0.0
    devices = base.deployment.devices, run.deployment.devices
    samples = LoadedRuns(base.requests, run.requests, windows_s, devices).samples(figure, recorded)
    if samples.base is None or samples.other is None:
        return None
    return ratio_interval(samples.other, samples.base, paired=samples.paired)
