"""One measured run: a schedule of arrivals, what came of it, its figures, and whether they are valid."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from bench.client.metrics import faults, summary
from bench.client.progress import shown
from bench.client.row import Row
from bench.client.run import Bounds, Run
from bench.client.runner import Runner
from bench.client.slo import PAPER, Slo
from bench.client.target import Ask, Target
from bench.client.validity import Objection, Rules, objections
from bench.client.window import Window, steady_window
from bench.workloads.arrivals import Arrivals, ClosedLoop, arrival_times
from bench.workloads.chance import Chance
from epd_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is sent and judged.

    Attributes:
        count, seconds: what ends it, whichever comes first.
        warm_up_s: before the window; None: a tenth of the run.
        leave_share: of the clients that leave, each within `leave_within_s` of sending.
        devices: that serve the endpoint.
    """

    arrivals: Arrivals
    count: int | None = None
    seconds: float | None = None
    seed: int = 0
    warm_up_s: float | None = None
    slos: Sequence[Slo] = PAPER
    devices: int | None = None
    leave_share: float = 0.0
    leave_within_s: float = 1.0
    rules: Rules = field(default_factory=Rules)
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        if self.count is None and self.seconds is None:
            raise ConfigError("a run has to end: say --duration or --n", param="--duration")

    def dues(self) -> list[float]:
        """Seconds from the start at which requests are due. Of an open loop only."""
        assert not isinstance(self.arrivals, ClosedLoop)
        times = itertools.islice(arrival_times(self.arrivals, self.seed), self.count)
        until = float("inf") if self.seconds is None else self.seconds
        return list(itertools.takewhile(lambda at: at < until, times))


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
        return {
            "run": self.run.label,
            "valid": self.valid,
            "stopped": self.run.stopped,
            "objections": [one.text for one in self.objections],
            "generator_goes_first": self.run.goes_first,
            "grows": self.grows,
            "faults": faults(self.run.rows),
            "said": _said(self.run.rows),
            **self.figures,
        }


async def measure(
    target: Target,
    asks: Sequence[Ask],
    plan: Plan,
    *,
    label: str = "",
    dues: Sequence[float] | None = None,
    keep: Callable[[Row], None] | None = None,
    started: Callable[[Runner], None] | None = None,
    progress: TextIO | None = None,
) -> Measured:
    """Send a run to `target` and judge it.

    Args:
        asks: sent in turn, over and over where the run is longer.
        dues: of an open loop, where they are known; else the plan's.
        keep: is given each row. started: is given the runner, to stop it. progress: where the live line goes.
    """

    def ask(n: int) -> Ask:
        return _leaving(asks[n % len(asks)], plan, n)

    runner = Runner(target, ask, name=secrets.token_hex(6), label=label, keep=keep, bounds=plan.bounds)
    if started is not None:
        started(runner)
    async with shown(runner.run, progress):
        if isinstance(plan.arrivals, ClosedLoop):
            run = await runner.closed_loop(plan.arrivals.concurrency, count=plan.count, seconds=plan.seconds)
        else:
            run = await runner.open_loop(plan.dues() if dues is None else dues)
    return judged(run, plan)


def judged(run: Run, plan: Plan) -> Measured:
    """The figures of a run that has ended, however it did."""
    window = steady_window(run.begun_s, run.issued_s, plan.warm_up_s)
    figures = summary(run, window, plan.slos, plan.devices)
    return Measured(run, window, figures, objections(run, window, plan.rules), window.grows(run.rows))


def _leaving(ask: Ask, plan: Plan, n: int) -> Ask:
    """The request, whose client leaves where chance has it so."""
    if not plan.leave_share:
        return ask
    chance = Chance("leave", plan.seed, n)
    if chance.uniform() >= plan.leave_share:
        return ask
    return replace(ask, cancel_after_s=chance.uniform() * plan.leave_within_s)


def _said(rows: Sequence[Row]) -> dict[str, str]:
    """What was said of each fault, the first time."""
    found: dict[str, str] = {}
    for row in rows:
        if row.fault and row.fault != "left":
            found.setdefault(row.fault, row.error)
    return found
