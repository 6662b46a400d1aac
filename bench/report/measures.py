"""What runs are compared by: TTFT, TPOT, throughput and attainment, each with its unit and direction. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.client.slo import Slo
from bench.report.experiment import Entry, Experiment, Run


@dataclass(frozen=True)
class Measure:
    """A number of a run.

    Attributes:
        name, unit: as axes and columns have them. lower: less is better.
        of: the number, None where the run has none.
    """

    name: str
    unit: str
    lower: bool
    of: Callable[[Entry, Run], float | None] = field(compare=False)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})"

    def better(self, one: float, other: float) -> bool:
        return one < other if self.lower else one > other


def _latency(name: str, figure: str, which: str) -> Measure:
    return Measure(name, "ms", True, lambda _, run: run.figure(figure, which))


def _per_device(entry: Entry, value: float | None) -> float | None:
    return None if value is None else value / entry.devices


TTFT = _latency("mean TTFT", "ttft_ms", "mean")
TTFT_P99 = _latency("P99 TTFT", "ttft_ms", "p99")
TPOT = _latency("mean TPOT", "tpot_ms", "mean")
TPOT_P99 = _latency("P99 TPOT", "tpot_ms", "p99")
THROUGHPUT = Measure("throughput", "output tokens/s", False, lambda _, run: run.tokens_per_s)
THROUGHPUT_PER_DEVICE = Measure(
    "throughput per device", "output tokens/s", False, lambda entry, run: _per_device(entry, run.tokens_per_s)
)


def attainment(slo: Slo) -> Measure:
    """In percent of the requests."""

    def percent(_: Entry, run: Run) -> float | None:
        share = run.attainment(slo)
        return None if share is None else 100.0 * share

    return Measure(f"SLO attainment, {in_words(slo)}", "%", False, percent)


def effective_per_device(slo: Slo) -> Measure:
    """Output tokens a second of requests within `slo`, per device (EPD-Serve Table 5)."""
    return Measure(
        "effective throughput per device",
        "output tokens/s",
        False,
        lambda entry, run: _per_device(entry, run.effective_tokens_per_s(slo)),
    )


def in_words(slo: Slo) -> str:
    return f"TTFT ≤ {slo.ttft_ms:g} ms, TPOT ≤ {slo.tpot_ms:g} ms"


def ranked(experiment: Experiment, measure: Measure, rate: float) -> list[tuple[Entry, Run, float]]:
    """Entries with a valid run at `rate` that has the number, best first; equals in the order of the experiment."""
    found = []
    for entry in experiment.entries:
        run = experiment.at(entry, rate)
        value = measure.of(entry, run) if run is not None and run.valid else None
        if run is not None and value is not None:
            found.append((entry, run, value))
    return sorted(found, key=lambda one: one[2] if measure.lower else -one[2])


def ranks(experiment: Experiment, measure: Measure, rate: float) -> dict[str, int]:
    """Rank by entry's name, 1 the best; equals share the better rank. Runs that are not valid have none."""
    order = ranked(experiment, measure, rate)
    return {entry.name: 1 + sum(measure.better(other, value) for _, _, other in order) for entry, _, value in order}
