"""One rate through AISBench: export, configuration, run, what it left, and whether that says anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.aisbench import process
from bench.aisbench.config import NAME, Entry, command_line, write_entry
from bench.aisbench.details import own_figures, read_requests, results_folder, said
from bench.aisbench.environment import AisBench
from bench.aisbench.flags import Asked
from bench.aisbench.report import Rated
from bench.aisbench.rows import most_under_way, run_of
from bench.aisbench.stream import Shape
from bench.clients.http import Endpoint
from bench.clients.measure import Measured, Objection, objections
from bench.clients.metrics import steady_window, summary
from bench.clients.sender import Run
from bench.workloads.export_aisbench import export_aisbench
from bench.workloads.images import Images
from bench.workloads.spec import RequestSpec
from epd_serve.errors import StageError

START_S, SUMMARY_S = 300.0, 120.0
"""For AISBench to begin and to compute its figures, on a busy machine; a request adds `ROW_S` to the second."""
ROW_S = 0.2
SLACK = 1.5
"""AISBench's own arrivals take so much longer than count over rate, at most."""


@dataclass(frozen=True)
class Endpointed:
    """What does not change from rate to rate."""

    endpoint: Endpoint
    model: str
    tokenizer: Path
    shape: Shape
    bench: AisBench


@dataclass(frozen=True)
class Outcome:
    """Of a rate. `rated`: None where AISBench measured nothing, and `nothing` says why. `signal`: that ended it."""

    rated: Rated | None
    signal: int = 0
    nothing: str = ""


def measure_rate(
    asked: Asked, fixed: Endpointed, rate_rps: float, number: int, folder: Path, pictures: Images
) -> Outcome:
    """Run AISBench in `folder`, which is made.

    Raises:
        ConfigError: the folder cannot be written, or AISBench cannot be started.
    """
    specs = asked.specs(rate_rps, number)
    label = label_of(rate_rps)
    export_aisbench(specs, pictures, folder)
    entry = Entry(
        url=str(fixed.endpoint),
        model=fixed.model,
        tokenizer=fixed.tokenizer,
        rate_rps=rate_rps,
        timed=asked.timed,
        requests=len(specs),
        api_key=asked.api_key,
    )
    write_entry(folder, entry)
    results = folder / "results"
    ended = process.run(
        command_line(fixed.bench.command, folder, results, len(specs)),
        folder,
        limit_s(specs, rate_rps, asked.timeout_s),
        host=fixed.endpoint.host,
        label=label,
        progress=sys.stderr,
    )
    stopped = "interrupted" if ended.signal else ""
    if ended.late:
        stopped = f"AISBench did not end within {limit_s(specs, rate_rps, asked.timeout_s):.0f} s and was ended"
    log = said(*sorted(results.glob(f"*/logs/infer/{NAME}/*.out")), folder / "ais_bench.log")
    left = results_folder(results)
    try:
        if left is None:
            raise StageError("AISBench did not come to send anything", stage="AISBench")
        sent, own = read_requests(left), own_figures(left)
    except StageError as error:
        why = stopped or log or f"{error.message} (exit code {ended.code})"
        return Outcome(None, ended.signal, f"{label}: {why}")
    run = run_of(label, sent, specs, fixed.shape)
    run.stopped = stopped
    if not stopped and len(run.rows) < len(specs):
        run.stopped = f"AISBench recorded {len(run.rows)} of {len(specs)} requests" + (f": {log}" if log else "")
    return Outcome(Rated(rate_rps, judged(run, asked, entry.at_once), own), ended.signal)


def judged(run: Run, asked: Asked, at_once: int) -> Measured:
    """The figures of a run by the definitions of `epd-bench load`, and why it is not valid where it is not."""
    window = steady_window(run.begun_s, run.issued_s, None)
    figures = summary(run, window, asked.slos, asked.devices)
    late = {name: value for name, value in figures.get("generator", {}).items() if name.startswith("late_")}
    figures["generator"] = {}  # nothing is known of AISBench's CPU time
    if asked.timed:
        figures["aisbench_late"] = late
    found = objections(run, window, asked.rules)
    if not asked.timed and most_under_way(run.rows) >= at_once < len(run.rows):
        found.append(
            Objection(
                "generator",
                f"{at_once} requests were under way, which is all that AISBench allows: others waited outside of its "
                "clock; ask for fewer requests, a lower rate, or --arrivals timestamps",
            )
        )
    return Measured(run, window, figures, found, window.grows(run.rows))


def limit_s(specs: Sequence[RequestSpec], rate_rps: float, timeout_s: float) -> float:
    """When a run must be over, whatever the endpoint does: AISBench itself waits for an answer without end."""
    last_s = specs[-1].arrival_s
    sending_s = SLACK * len(specs) / rate_rps if last_s is None else last_s
    return START_S + sending_s + timeout_s + SUMMARY_S + ROW_S * len(specs)


def label_of(rate_rps: float) -> str:
    """Of a run in tables, rows and figures, as `epd-bench load` calls it."""
    return f"{rate_rps:g} rps"


def folder_of(rate_rps: float) -> str:
    """The name of a rate's folder."""
    return f"rate-{rate_rps:g}"
