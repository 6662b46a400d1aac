"""One run of a sweep: its requests made and sent, judged, told as text, and joined with the endpoint's phase stamps.

Whatever ends it (a signal, an endpoint that is gone, a full disk), what was measured until then is there.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.clients.bodies import Source
from bench.clients.measure import Measured, Plan, measure
from bench.clients.phases import breakdown, joined, phase_figures, phase_rows, request_phases
from bench.clients.results import RequestRecord, append_lines
from bench.clients.sender import Sender
from bench.clients.slo import beside
from bench.clients.target import Target
from bench.record import flatten
from bench.workloads.requests import Arrivals, ClosedLoop, Poisson
from deploy.host import event_loop
from deploy.memory.placement_table import table
from epd_serve.errors import ConfigError
from epd_serve.phases.stamps import Timeline, read_stamps
from epd_serve.slo import Slo

KINDS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def run_text(measured: Measured, slos: Sequence[Slo]) -> str:
    """Latencies, objectives, what went wrong, and why the run is not valid where it is not."""
    figures, row = measured.figures, measured.row()
    lines = [
        f"{row['run']}: {figures['ok']} of {figures['requests']} requests of the window answered whole "
        f"({figures['window_s']:.1f} s of {figures['run_s']:.1f} s; {figures['requests_of_the_run']} requests in all)"
    ]
    rows: list[tuple[str, ...]] = [("milliseconds", *COLUMNS)]
    for kind in filter(figures.__contains__, KINDS):
        rows.append((kind.removesuffix("_ms").upper(), *(f"{figures[kind][column]:.2f}" for column in COLUMNS)))
    if len(rows) > 1:
        lines.append(table(rows))
    if "output_tokens_per_s" in figures:
        lines.append(
            f"  offered {figures['offered_rps']:.2f} requests/s, answered {figures['answered_rps']:.2f}, "
            f"{figures['output_tokens_per_s']:.1f} output tokens/s"
        )
    lines += _objectives(figures, slos)
    lines += [f"  {count} × {fault}: {row['said'][fault]}" for fault, count in row["faults"].items()]
    if measured.grows:
        lines.append(f"  no steady state: {measured.grows}")
    cost = figures["generator"]
    if "late_p99_ms" in cost:
        lines.append(
            f"  generator: {cost['late_p99_ms']:.1f} ms late (P99), {cost['cpu_share']:.2f} of a core, "
            f"{cost['cpu_us_per_request']:.0f} us per request"
        )
    return "\n".join([*lines, *(f"  NOT VALID: {one}" for one in row["objections"])])


def phase_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of `bench.clients.phases.phase_rows`."""
    shown = [tuple(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()) for row in rows]
    return table([tuple(rows[0]), *shown]) if rows else ""


def _objectives(figures: Mapping[str, Any], slos: Sequence[Slo]) -> list[str]:
    rows: list[tuple[str, ...]] = [("objective", "attained", "effective tokens/s", "per device")]
    for slo in beside(slos):
        one = figures.get(f"slo_{slo}", {})
        if "attainment" in one:
            per_s = (one.get(f"effective_tokens_per_s{each}") for each in ("", "_per_device"))
            shown = ("-" if value is None else f"{value:.1f}" for value in per_s)
            rows.append((slo.text, f"{one['attainment']:.1%}", *shown))
    return [table(rows)] if len(rows) > 1 else []


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
        options: dict[str, Any] = {"label": label, "dues": requests.dues, "keep": keep}
        senders: list[Sender] = []
        with _stopped_by_signals(senders, ended_by):
            return await measure(target, requests.requests, plan, started=senders.append, **options)

    measured = event_loop.run(sent())
    figures = dict(measured.figures)
    if traces is not None:
        figures["phases"] = _joined(measured, traces, phases_path)
    print("\n" + run_text(measured, plan.slos), flush=True)
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
    print("\n" + phase_table(phase_rows(found)), flush=True)
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
    return f"{arrivals.rate_rps:g} rps" if isinstance(arrivals, Poisson) else "trace"
