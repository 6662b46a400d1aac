"""Runs one after another, at given rates or in search of the goodput; each is told and written down as it ends.

Whatever ends a sweep (a signal, an endpoint that is gone, a full disk), what was measured until then is there.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.clients import report
from bench.clients.bodies import Source, prepared
from bench.clients.goodput import Search
from bench.clients.measure import Measured, Plan, measure
from bench.clients.records import RequestRecord
from bench.clients.resume import Earlier
from bench.clients.sender import Sender
from bench.clients.slo import attainment
from bench.clients.target import Request, Target
from bench.phases import DISAGGREGATED, OF_STAGES, SEEN_BY_PROXY, SENT, groups, mean_phases, phases
from bench.record import flatten, write
from bench.stamps import Timeline, read_stamps
from bench.workloads.arrivals import Arrivals, ClosedLoop
from deploy import event_loop
from epd_serve.errors import ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SEARCH_REQUESTS = 100
"""Of a probe, at least: of fewer an attainment of 90 % cannot be told from one of 80."""


@dataclass
class SweepResult:
    """What a sweep has measured so far.

    Attributes:
        signal: that ended it, or 0. over: why no more runs make sense; "" while they do.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    valid: bool = True
    signal: int = 0
    over: str = ""


class Sweep:
    """Measures `target`.

    Args:
        keep: is given every record. traces: folder of the endpoint's phase stamps. phases: file for each request's.
        json_path, env: of the result (`bench/record.py`), written after every run.
        earlier: what an earlier sweep has measured of the same experiment; it is not measured again.
        say: prints.
    """

    def __init__(
        self,
        target: Target,
        source: Source,
        plan: Plan,
        *,
        keep: Callable[[RequestRecord], None] | None = None,
        traces: Path | None = None,
        phases: Path | None = None,
        json_path: Path | None = None,
        env: Mapping[str, Any] | None = None,
        earlier: Earlier | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._target, self._source, self._plan = target, source, plan
        self._keep, self._traces, self._phases = keep, traces, phases
        self._json, self._env, self._say = json_path, dict(env or {}), say
        earlier = earlier or Earlier()
        rows = [dict(row) for row in earlier.rows]
        self.result = SweepResult(dict(earlier.figures), rows, valid=all(row["valid"] for row in rows))

    def rates(self, arrivals: Sequence[Arrivals]) -> SweepResult:
        """A run of each that is not there yet. Which requests one has depends on its place alone."""
        there = {row["run"] for row in self.result.rows}
        for number, (label, one) in enumerate(zip(labels(arrivals), arrivals, strict=True)):
            if label in there:
                self._say(f"\n{label}: measured before")
                continue
            plan = replace(self._plan, arrivals=one, seed=self._plan.seed + number)
            self.result.valid &= self._one(plan, number, label).valid
            if self.result.signal or self.result.over:
                break
        return self.result

    def goodput(self, arrivals: Callable[[float], Arrivals], search: Search, target: float) -> SweepResult:
        """Probes until `search` has found the goodput of the plan's first objective. A probe that is too bad to be
        measured is a miss."""
        tried: list[Arrivals] = []
        slo = self._plan.slos[0]
        while (rate := search.next()) is not None:
            seconds, number = max(self._plan.seconds or 0.0, SEARCH_REQUESTS / rate), len(tried)
            tried.append(arrivals(rate))
            plan = replace(self._plan, arrivals=tried[-1], seed=self._plan.seed + number, count=None, seconds=seconds)
            measured = self._one(plan, number, labels(tried)[-1])
            if any(one.whose != "answers" for one in measured.objections):
                self.result.valid = False
                break
            attained, about = attainment(measured.window.due(measured.run.rows), slo)
            search.add(rate, attained, about, steady=not measured.grows)
        result, devices = search.result(), self._plan.devices
        self._say(report.goodput(result, search.probed, target, slo, devices))
        self.result.figures["goodput_rps"] = result.rate_rps
        if devices:
            self.result.figures["goodput_rps_per_device"] = result.rate_rps / devices
        self.result.valid &= bool(result.rate_rps)
        self._write()
        return self.result

    def _one(self, plan: Plan, number: int, label: str) -> Measured:
        requests = self._source.of_run(plan, number)
        with prepared(requests.bodies) as made:
            measured = event_loop.run(self._sent(made, plan, label=label, dues=requests.dues))
        figures = dict(measured.figures)
        if self._traces is not None:
            figures["phases"] = self._joined(measured, self._traces)
        self._say("\n" + report.one_run(measured, plan.slos))
        self.result.rows.append({**measured.row(), "number": number, "repeated_requests": requests.repeats})
        self.result.figures |= flatten({label: figures})
        self.result.over = next((one.text for one in measured.objections if one.whose == "end"), "")
        self._write()
        return measured

    async def _sent(
        self, requests: Sequence[Request], plan: Plan, label: str, dues: Sequence[float] | None
    ) -> Measured:
        senders: list[Sender] = []
        options: dict[str, Any] = {"label": label, "dues": dues, "keep": self._keep, "progress": sys.stderr}
        with self._stopped_by_signals(senders):
            return await measure(self._target, requests, plan, started=senders.append, **options)

    @contextmanager
    def _stopped_by_signals(self, senders: Sequence[Sender]) -> Iterator[None]:
        """The first signal ends the run in good order, a second one at once."""
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self.result.signal = number
            for sender in senders:
                sender.stop("interrupted")
            for one in SIGNALS:
                loop.remove_signal_handler(one)

        before = [signal.getsignal(number) for number in SIGNALS]
        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _joined(self, measured: Measured, traces: Path) -> dict[str, Any]:
        """Mean phases of the window's whole answers; each request's to its file."""
        timeline = Timeline(read_stamps(traces))
        rows = [joined(record, timeline) for record in measured.window.due(measured.run.rows) if record.ok]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            self._say(f"{len(rows) - len(known)} of {len(rows)} requests are not in the stamps of {traces}")
        if self._phases is not None:
            try:
                with self._phases.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in known)
            except OSError as error:
                raise ConfigError(f"{self._phases}: {error.strerror}", param="--rows") from error
        return mean_phases(known)

    def _write(self) -> None:
        write(self._json, self.result.figures, self._env, self.result.rows)


def joined(record: RequestRecord, timeline: Timeline) -> dict[str, Any] | None:
    """Milliseconds per phase and group of the request's TTFT; they add up to it but for `residual_ms`.

    The sender's request id is in the proxy's stamp `arrived`; both read CLOCK_MONOTONIC, so it holds on one host only.
    None where the request has no first token, or the stamps do not know it.
    """
    events = timeline.named(record.id)
    if not events or record.first_s is None or record.sent_s is None or record.ttft_s is None:
        return None
    path = (SENT, *(DISAGGREGATED if OF_STAGES & events.keys() else SEEN_BY_PROXY))
    taken = phases(path, {**events, "sent": record.sent_s, "first_content": record.first_s}, record.due_s)
    by_kind = {"phases_ms": taken, "groups_ms": groups(path, taken)}
    return {
        "id": record.id,
        "run": record.run,
        "path": record.path,
        **{kind: {name: round(at * 1e3, 3) for name, at in values.items()} for kind, values in by_kind.items()},
        "residual_ms": round((record.ttft_s - sum(taken.values())) * 1e3, 3),
    }


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
