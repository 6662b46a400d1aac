"""How a run of an entry is sent and judged, however the entry is measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.client.measure import Plan
from bench.client.run import Bounds
from bench.client.validity import Rules
from bench.layouts.entry import Entry
from bench.layouts.experiment import Experiment, Planned


@dataclass(frozen=True)
class Judged:
    """Limits of a run, as `epd-bench load` has them."""

    rules: Rules = field(default_factory=Rules)
    bounds: Bounds = field(default_factory=Bounds)
    warm_up_s: float | None = None

    def plan(self, experiment: Experiment, entry: Entry, run: Planned) -> Plan:
        """Of one rate. Its seed follows from the rate's place, so that all entries get the same requests."""
        return Plan(
            run.arrivals,
            count=experiment.count,
            seconds=experiment.seconds,
            seed=experiment.seed + run.number,
            warm_up_s=self.warm_up_s,
            slos=experiment.slos,
            devices=entry.devices,
            rules=self.rules,
            bounds=self.bounds,
        )
