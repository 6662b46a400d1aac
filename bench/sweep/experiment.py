"""An experiment: deployments, rates, requests, and the limits of a run; and whether two experiments are one. Pure.

It is the one record of what was asked: the sweep measures by it, `experiment.json` keeps it, the analysis reads it
back. A resumed sweep has to ask what the first one asked, or its deployments could not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.clients.measure import Plan, Rules
from bench.clients.sender import Bounds
from bench.clients.slo import PAPER, Slo
from bench.clients.sweep import label_of
from bench.sweep.deployments import Deployment
from bench.workloads.arrivals import Arrivals, arrivals_at


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run to be made.

    Attributes:
        number: among the deployment's runs; every deployment's run of a number has the same requests, if not at the
            same times.
        rate: as it was asked for. rate_rps: of all devices together.
        label: of the run, in rows and figures.
    """

    number: int
    rate: float
    rate_rps: float
    arrivals: Arrivals
    label: str


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What bounds a run and makes it valid, as `epd-bench load` has it.

    Attributes:
        timeout_s: of one request. warm_up_s: of a run, not counted; None: a tenth of it.
        min_samples: good answers that a run needs. late_ms: by which the generator may be late.
    """

    timeout_s: float = 120.0
    warm_up_s: float | None = None
    min_samples: int = 10
    late_ms: float = 100.0


@dataclass(frozen=True)
class Experiment:
    """What is asked.

    Attributes:
        kind: `real`, `simulated` or `emulated …`.
        rates: requests a second, as given; of each device where `per_device`, else of all together.
        arrivals: their form.
        duration_s, count: what ends a run, whichever comes first.
        knobs: of the workload. served: what serves: engine, device, model.
        machine, versions: on which all of it was measured.
    """

    kind: str
    workload: str
    rates: tuple[float, ...]
    deployments: tuple[Deployment, ...]
    per_device: bool = False
    arrivals: str = "poisson"
    duration_s: float | None = None
    count: int | None = None
    seed: int = 0
    slos: tuple[Slo, ...] = PAPER
    limits: RunLimits = RunLimits()
    knobs: Mapping[str, Any] = field(default_factory=dict)
    served: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def real(self) -> bool:
        return self.kind.startswith("real")

    @property
    def rate_axis(self) -> str:
        """What rates are called on axes and in tables."""
        return f"request rate (req/s{' per device' if self.per_device else ''})"

    def runs(self, deployment: Deployment) -> list[PlannedRun]:
        """The runs of a deployment, in order."""
        totals = [rate * (deployment.devices if self.per_device else 1) for rate in self.rates]
        arrivals = [arrivals_at(self.arrivals, total) for total in totals]
        return [
            PlannedRun(number, rate, total, one, label_of(one))
            for number, (rate, total, one) in enumerate(zip(self.rates, totals, arrivals, strict=True))
        ]

    def plan(self, deployment: Deployment, run: PlannedRun) -> Plan:
        """How a run is sent and judged. Its seed follows from its number, so all deployments get the same requests."""
        return Plan(
            run.arrivals,
            count=self.count,
            seconds=self.duration_s,
            seed=self.seed + run.number,
            warm_up_s=self.limits.warm_up_s,
            slos=self.slos,
            devices=deployment.devices,
            rules=Rules(self.limits.min_samples, self.limits.late_ms),
            bounds=Bounds(limit_s=self.limits.timeout_s),
        )

    def to_json(self) -> dict[str, Any]:
        """`experiment.json`, as reading the file gives it back."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain
