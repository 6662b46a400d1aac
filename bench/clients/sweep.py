"""One run of a sweep: its requests made and sent, judged, told, and joined with the phase stamps of the endpoint.

Whatever ends it (a signal, an endpoint that is gone, a full disk), what was measured until then is there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.clients import report
from bench.clients.bodies import Source
from bench.clients.measure import Measured, Plan, measure
from bench.clients.phases import joined
from bench.clients.records import RequestRecord
from bench.clients.results import append_lines
from bench.clients.sender import Sender
from bench.clients.target import Target
from bench.phases import breakdown, phase_figures, phase_rows, request_phases
from bench.record import flatten
from bench.stamps import Timeline, read_stamps
from bench.workloads.arrivals import Arrivals, ClosedLoop
from deploy.host import event_loop
from epd_serve.errors import ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class RunFound:
    """What a run found.

    Attributes:
        row, figures: of its result. signal: that ended it, or 0.
    """

    measured: Measured
    row: dict[str, Any]
    figures: dict[str, float]
    signal: int

    @property
    def over(self) -> str:
        """Why no more runs make sense; "" while they do."""
        return next((one.text for one in self.measured.objections if one.whose == "end"), "")


def one_run(
    target: Target,
    source: Source,
    plan: Plan,
    label: str,
    number: int = 0,
    *,
    keep: Callable[[RequestRecord], None] | None = None,
    traces: Path | None = None,
    phases_path: Path | None = None,
) -> RunFound:
    """Send a run to `target` and print what it found.

    Args:
        number: its place in the sweep, on which its requests depend.
        keep: is given every record.
        traces: folder of the endpoint's phase stamps. phases_path: file for each request's.
    """
    requests = source(plan, number)
    if not requests.requests:
        raise ConfigError("there is no request to send", param="--workload")
    ended_by = [0]

    async def sent() -> Measured:
        options: dict[str, Any] = {"label": label, "dues": requests.dues, "keep": keep, "progress": sys.stderr}
        senders: list[Sender] = []
        with _stopped_by_signals(senders, ended_by):
            return await measure(target, requests.requests, plan, started=senders.append, **options)

    measured = event_loop.run(sent())
    figures = dict(measured.figures)
    if traces is not None:
        figures["phases"] = _joined(measured, traces, phases_path)
    print("\n" + report.one_run(measured, plan.slos), flush=True)
    row = {**measured.row(), "number": number, "repeated_requests": requests.repeats}
    return RunFound(measured, row, flatten({label: figures}), ended_by[0])


@contextmanager
def _stopped_by_signals(senders: Sequence[Sender], ended_by: list[int]) -> Iterator[None]:
    """The first signal ends the run in good order, a second one at once."""
    loop = asyncio.get_running_loop()
    before = [signal.getsignal(number) for number in SIGNALS]

    def restore() -> None:
        for number, handler in zip(SIGNALS, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def stop(number: int) -> None:
        ended_by[0] = number
        for sender in senders:
            sender.stop("interrupted")
        restore()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        restore()


def _joined(measured: Measured, traces: Path, phases_path: Path | None) -> dict[str, Any]:
    """Phases of the window's whole answers; each request's to its file."""
    timeline = Timeline(read_stamps(traces))
    rows = [joined(record, timeline) for record in measured.window.due(measured.run.rows) if record.ok]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        print(f"{len(rows) - len(known)} of {len(rows)} requests are not in the stamps of {traces}")
    if phases_path is not None:
        append_lines(phases_path, known, "--rows")
    found = breakdown(map(request_phases, known))
    if found is None:
        return {"joined": 0}
    print("\n" + report.phases(phase_rows(found)), flush=True)
    return phase_figures(found)


def labels(arrivals: Sequence[Arrivals]) -> list[str]:
    """Of runs in tables, rows and figures, in order. A rate that is measured again says so."""
    names: list[str] = []
    for one in map(label_of, arrivals):
        again = sum(name.split(" (")[0] == one for name in names)
        names.append(f"{one} ({again + 1})" if again else one)
    return names


def label_of(arrivals: Arrivals) -> str:
    """What a run is called."""
    if isinstance(arrivals, ClosedLoop):
        return f"{arrivals.concurrency} at once"
    return "trace" if arrivals.rate_rps is None else f"{arrivals.rate_rps:g} rps"
