"""One measured run: a schedule of arrivals, what came of it, its figures, and whether they are valid.

Refusals (429, 503) are what an overloaded server is meant to do: they are misses, not a run gone wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.clients.answers import CROWDED, REFUSALS
from bench.clients.metrics import Window, faults, steady_window, summary
from bench.clients.results import RequestRecord
from bench.clients.sender import Bounds, Flow, Run, Sender
from bench.clients.slo import PAPER, counted
from bench.clients.target import Request, Target
from bench.workloads.requests import Arrivals, ClosedLoop, arrival_times
from epd_serve.errors import ConfigError
from epd_serve.slo import Slo


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run has to keep to.

    Attributes:
        min_samples: whole answers in the window; of fewer a percentile is one request's luck.
        late_ms: by which the sender may come late to requests; more so to one of them, or to one in a hundred: a single
            hiccup is no overload. Its own delay is charged to the server.
        max_failed: share of requests that may fail otherwise than by a refusal.
    """

    min_samples: int = 10
    late_ms: float = 25.0
    max_failed: float = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is sent and judged.

    Attributes:
        count, seconds: what ends it, whichever comes first.
        warm_up_s: before the window; None: a tenth of the run.
        devices: that serve the endpoint.
    """

    arrivals: Arrivals
    count: int | None = None
    seconds: float | None = None
    seed: int = 0
    warm_up_s: float | None = None
    slos: Sequence[Slo] = PAPER
    devices: int | None = None
    rules: Rules = field(default_factory=Rules)
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        if self.count is None and self.seconds is None:
            raise ConfigError("a run has to end: say --duration or --n", param="--duration")

    @property
    def until_s(self) -> float:
        """Seconds from its start at which the run ends; infinite where its count ends it."""
        return float("inf") if self.seconds is None else self.seconds

    def dues(self) -> list[float]:
        """Seconds from the start at which requests are due. Of an open loop only."""
        assert not isinstance(self.arrivals, ClosedLoop)
        times = itertools.islice(arrival_times(self.arrivals, self.seed), self.count)
        return list(itertools.takewhile(lambda at: at < self.until_s, times))


@dataclass(frozen=True, slots=True)
class Objection:
    """A reason why a run is not valid.

    Attributes:
        whose: `end`: it was ended early. `generator`: the measuring is at fault. `answers`: what came is too little, or
            too bad, to be measured; a search for the goodput takes that for a miss.
    """

    whose: Literal["end", "generator", "answers"]
    text: str


@dataclass(frozen=True)
class Measured:
    """A run and what it says. `grows`: why it is no steady state, else ""."""

    run: Run
    window: Window
    figures: dict[str, Any]
    objections: list[Objection]
    grows: str

    @property
    def valid(self) -> bool:
        return not self.objections

    def row(self) -> dict[str, Any]:
        """The run as one row of a result."""
        said = {record.fault: record.error for record in reversed(self.run.rows) if record.fault and not record.left}
        return {
            "run": self.run.label,
            "valid": self.valid,
            "stopped": self.run.stopped,
            "objections": [one.text for one in self.objections],
            "generator_goes_first": self.run.goes_first,
            "grows": self.grows,
            "faults": faults(self.run.rows),
            "said": said,  # of each fault, the first time
            **self.figures,
        }


async def measure(
    target: Target,
    requests: Sequence[Request],
    plan: Plan,
    *,
    label: str = "",
    dues: Sequence[float] | None = None,
    keep: Callable[[RequestRecord], None] | None = None,
    started: Callable[[Sender], None] | None = None,
) -> Measured:
    """Send a run to `target` and judge it.

    Args:
        requests: sent in turn, over and over where the run is longer.
        dues: of an open loop, where they are known; else the plan's.
        keep: is given each record. started: is given the sender, to stop it.
    """
    sender = Sender(target, label=label, keep=keep, bounds=plan.bounds)
    if started is not None:
        started(sender)
    if isinstance(plan.arrivals, ClosedLoop):
        concurrency = plan.arrivals.concurrency
        flow = Flow(requests, concurrency=concurrency, count=plan.count, duration_s=plan.seconds)
    else:
        flow = Flow(requests, dues=plan.dues() if dues is None else dues)
    return judged(await sender.run(flow), plan)


def judged(run: Run, plan: Plan) -> Measured:
    """The figures of a run that has ended, however it did."""
    window = steady_window(run.begun_s, run.issued_s, plan.warm_up_s)
    figures = summary(run, window, plan.slos, plan.devices)
    return Measured(run, window, figures, objections(run, window, plan.rules), window.grows(run.rows))


def objections(run: Run, window: Window, rules: Rules) -> list[Objection]:
    """Why the run is not valid; empty when it is."""
    records = window.due(run.rows)
    reasons = [Objection("end", run.stopped)] if run.stopped else []
    if not any(record.ok for record in run.rows):
        none = f"not one good answer among {len(run.rows)} requests{_why(run.rows)}"
        return [*reasons, Objection("answers", none)]
    good = sum(record.ok for record in records)
    if good < rules.min_samples:
        window_s = f"the window of {window.length_s:.1f} s"
        few = f"{good} good answers in {window_s}, {rules.min_samples} are needed: run longer"
        reasons.append(Objection("answers", few))
    about = counted(records)
    failed = [record for record in about if not record.ok and record.fault not in REFUSALS]
    if len(failed) > rules.max_failed * len(about):
        reasons.append(Objection("answers", f"{len(failed)} of {len(about)} requests failed{_why(failed)}"))
    late = [late_ms for record in run.rows if (late_ms := record.late_s * 1e3) > rules.late_ms]
    if len(late) > max(1, len(run.rows) // 100):
        text = (
            f"the generator came up to {max(late):.0f} ms late to {len(late)} of {len(run.rows)} requests, "
            f"{rules.late_ms:g} are allowed: it is overloaded, or starved of CPU by what runs beside it"
        )
        reasons.append(Objection("generator", text))
    if crowded := sum(record.fault == CROWDED for record in run.rows):
        reasons.append(Objection("generator", f"{crowded} requests were not sent, since too many were under way"))
    return reasons


def _why(records: Sequence[RequestRecord]) -> str:
    """What went wrong most often, with what was said."""
    kinds = faults(records)
    if not kinds:
        return ""
    worst = next(iter(kinds))
    said = next(record.error for record in records if record.fault == worst)
    return f": {', '.join(f'{count} × {kind}' for kind, count in kinds.items())}; {worst}: {said}"
