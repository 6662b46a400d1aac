"""Deployments against each other: samples of what they are compared by, and ratios to the monolith. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.client.row import Row
from bench.client.slo import Slo
from bench.client.window import steady_window
from bench.report.bootstrap import CONFIDENCE, Sample, interval
from bench.report.experiment import Entry, Experiment, Run
from bench.report.measures import THROUGHPUT_PER_DEVICE, TPOT, TTFT, Measure, effective_per_device
from bench.report.sheet import Cell, Sheet
from epd_serve.errors import LayoutError
from epd_serve.layout_parser import parse
from epd_serve.roles import Role

NEGLIGIBLE = 0.02
"""Difference of a ratio from 1: with the same requests on both sides an interval may exclude 1 by nothing at all."""
Rows = Mapping[str, Sequence[Row]]
"""Requests by entry's name."""


@dataclass(frozen=True)
class Ratio:
    """`entry` over another at one rate. `low`, `high`: None where there are too few requests.

    Attributes:
        value, reference: what is divided, in the measure's unit.
    """

    entry: Entry
    measure: Measure
    rate: float
    value: float
    reference: float
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float:
        return self.value / self.reference

    @property
    def sure(self) -> bool:
        """Its interval excludes 1, and it is not so near to 1 that nobody would choose by it."""
        beyond_chance = self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high
        return beyond_chance and abs(self.ratio - 1.0) >= NEGLIGIBLE

    @property
    def better(self) -> bool:
        return self.measure.better(self.ratio, 1.0)

    def __str__(self) -> str:
        between = "" if self.low is None or self.high is None else f", {self.low:.2f} to {self.high:.2f}"
        return f"{self.ratio:.2f} times{between}"


def measures(slo: Slo) -> tuple[Measure, ...]:
    """What deployments are compared by."""
    return TTFT, TPOT, THROUGHPUT_PER_DEVICE, effective_per_device(slo)


def monolith(experiment: Experiment) -> Entry | None:
    """What the others are compared to: a baseline of whole instances, else any entry of such; of several the one whose
    device count the most entries have. None where there is none that was measured."""
    whole = [entry for entry in experiment.entries if entry.runs and is_monolith(entry)]
    counts = [entry.devices for entry in experiment.entries]
    return max(whole, key=lambda entry: (entry.baseline, counts.count(entry.devices)), default=None)


def is_monolith(entry: Entry) -> bool:
    """Each of its instances runs all stages."""
    try:
        return parse(entry.layout).roles == {Role.EPD}
    except LayoutError:  # a baseline of somebody else's
        return False


class Compared:
    """Ratios of an experiment's valid runs. Samples and intervals are made once."""

    def __init__(self, experiment: Experiment, rows: Rows) -> None:
        self._experiment = experiment
        self._rows = {
            (name, label): sorted(of_run, key=lambda row: row.n)
            for name, own in rows.items()
            for label, of_run in _by_run(own).items()
        }
        self._samples: dict[tuple[str, str, Measure], Sample] = {}
        self._intervals: dict[tuple[str, str, str, str, Measure], tuple[float | None, float | None]] = {}

    def ratio(self, measure: Measure, rate: float, entry: Entry, other: Entry) -> Ratio | None:
        """None where one of them has no valid run at `rate`, or no such figure, or `other` has 0."""
        mine, theirs = (self._experiment.at(one, rate) for one in (entry, other))
        if mine is None or theirs is None or not (mine.valid and theirs.valid):
            return None
        value, reference = measure.of(entry, mine), measure.of(other, theirs)
        if value is None or not reference:
            return None
        key = entry.name, mine.label, other.name, theirs.label, measure
        if key not in self._intervals:
            one, two = self._sample(measure, entry, mine), self._sample(measure, other, theirs)
            self._intervals[key] = interval(one, two, value / reference)
        low, high = self._intervals[key]
        return Ratio(entry, measure, rate, value, reference, low, high)

    def to(self, against: Entry | None) -> list[Ratio]:
        """Of every other entry to `against`, by measure and rate."""
        experiment = self._experiment
        return [
            ratio
            for measure, rate in itertools.product(measures(experiment.slos[0]), experiment.measured_rates)
            for entry in experiment.entries
            if against is not None and entry is not against
            if (ratio := self.ratio(measure, rate, entry, against)) is not None
        ]

    def _sample(self, measure: Measure, entry: Entry, run: Run) -> Sample:
        key = entry.name, run.label, measure
        if key not in self._samples:
            self._samples[key] = sample(measure, self._experiment, self._rows.get((entry.name, run.label), ()))
        return self._samples[key]


def sample(measure: Measure, experiment: Experiment, rows: Sequence[Row]) -> Sample:
    """What each request of a run adds to `measure`: one of those of `measures`. Its mean is proportional to it."""
    names = {row.n: row.spec for row in rows}
    if not rows:
        return Sample({}, names)
    dues = [row.due_s for row in rows]
    warm_up = experiment.asked.get("judged", {}).get("warm_up_s")
    window = steady_window(min(dues), max(dues), float(warm_up) if warm_up is not None else None)
    if measure in (TTFT, TPOT):
        times = {row.n: row.ttft_s if measure == TTFT else row.tpot_s for row in window.due(rows) if row.ok}
        return Sample({n: (seconds, 1.0) for n, seconds in times.items() if seconds is not None}, names)
    slo = None if measure == THROUGHPUT_PER_DEVICE else experiment.slos[0]
    return Sample(
        {row.n: (window.tokens([row]) if slo is None or slo.attained(row) else 0.0, 1.0) for row in rows}, names
    )


def _by_run(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.run, []).append(row)
    return found


def sheet(experiment: Experiment, against: Entry | None, found: Sequence[Ratio]) -> Sheet:
    """A row per ratio."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (one.entry.name, one.entry.devices, one.rate, one.measure.label, one.value, one.reference, *_of(one))
        for one in found
    )
    columns = (
        "deployment",
        "devices",
        experiment.rate_words,
        "measure",
        "its value",
        "the monolith's",
        "ratio",
        f"from ({CONFIDENCE:.0%})",
        "to",
        "beyond chance",
    )
    note = (
        "Intervals are by bootstrap over blocks of the requests of these runs, the same requests of both sides where "
        f"both were asked the same. They know nothing of other days and machines. A ratio within "
        f"{NEGLIGIBLE:.0%} of 1 is not told apart either."
    )
    name = against.known_as if against else "none was measured"
    return Sheet("ratios", f"Ratios to the monolith ({name})", columns, rows, note=note)


def _of(one: Ratio) -> tuple[Cell, ...]:
    verdict = ("better" if one.better else "worse") if one.sure else "not told apart"
    return one.ratio, one.low, one.high, verdict if one.low is not None else None
