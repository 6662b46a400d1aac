"""`epd-bench selfcheck`: how far the load generator can be trusted, against a server whose every delay is known.

The server runs in a process of its own. Errors are absolute differences between what the generator reports of a request
and the delays that the request asked for, so the server's own lateness and the way between both are in them too; the
same against the moments at which the server says it wrote are beside them. Requests per core are of the generator's own
CPU time, with a body and an answer of usual size, each token an event that is read by itself. Then other clients send
the same to the same server (`bench/selfcheck_clients.py`), which takes minutes: they are slow to start.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench import selfcheck_clients
from bench.aisbench.environment import default_folder
from bench.children import Child
from bench.clients.bodies import prepared, streamed
from bench.clients.known_server import MODEL, Known
from bench.clients.measure import Measured, Plan, measure
from bench.clients.records import RequestRecord
from bench.clients.target import Target
from bench.goals import Goal, goal_table
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from bench.statistic import percentile
from bench.workloads.arrivals import Arrivals, ClosedLoop, Poisson
from deploy import event_loop
from deploy.placement_table import table
from epd_serve.errors import StageError

PART_S, QUICK_S = 20.0, 4.0
"""Of each of the two parts."""
RATE_RPS = 50.0
KNOWN = tuple(
    Known(first_s=first_s, gap_s=gap_s, tokens=tokens, role_first=True)
    for first_s, gap_s, tokens in itertools.product((0.05, 0.2, 0.8), (0.01, 0.03), (16, 64))
)
"""Answers from short to long; each begins with a role-only event at once, which must not count as a token."""
BODY_BYTES = 20_000
BUSY = Known(first_s=0.02, gap_s=0.005, tokens=64)
AT_ONCE = 64
GOALS = (
    Goal("ttft_error_ms", "<=", 2.0, "known delays, 50 requests a second: the mean"),
    Goal("tpot_error_ms", "<=", 2.0, "known delays, 50 requests a second: the mean"),
    Goal("generator_rps_per_core", ">=", 500.0, "bodies of 20 KB, 64 tokens one by one"),
)


@dataclass(frozen=True)
class Errors:
    """Of one request, in milliseconds: against the delays asked for, and against what the server says it did."""

    ttft_ms: float
    tpot_ms: float
    ttft_to_written_ms: float
    tpot_to_written_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record_arguments(parser, quick="8 s of requests instead of 40, and other clients one round of 20")
    parser.add_argument("--no-clients", action="store_true", help="without AISBench and vLLM bench, which take minutes")
    parser.add_argument(
        "--aisbench-venv",
        type=Path,
        default=default_folder(),
        metavar="DIR",
        help="environment with AISBench; without one it is not measured (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, write. 1 where a goal is missed, or the machine was too busy to tell."""
    env = environment(argv, kind="real client, simulated server", asked=arguments)
    seconds = QUICK_S if arguments.quick else PART_S
    server = Child("bench.clients.known_server", {"usual": msgspec.to_builtins(selfcheck_clients.USUAL)})
    others = selfcheck_clients.Compared()
    try:
        url = server.hear()["url"]
        known = _sent(url, Poisson(RATE_RPS), KNOWN, seconds, pad=0)
        written = server.ask()["written"]
        server.tell(forget=True)
        busy = _sent(url, ClosedLoop(AT_ONCE), (BUSY,), seconds, pad=BODY_BYTES)
        if not arguments.no_clients:
            print("other clients take some minutes …", file=sys.stderr)
            rounds = 1 if arguments.quick else selfcheck_clients.ROUNDS
            count = selfcheck_clients.QUICK_REQUESTS if arguments.quick else selfcheck_clients.REQUESTS
            others = selfcheck_clients.compare(url, arguments.aisbench_venv, count, rounds)
    finally:
        server.stop()
    wrong = [f"{row.outcome}: {row.fault} {row.error}" for one in (known, busy) for row in one.run.rows if not row.ok]
    if wrong:
        raise StageError(f"{len(wrong)} answers of the known server were not whole, the first: {wrong[0]}", stage=url)
    errors = [errors_of(row, KNOWN[row.n % len(KNOWN)], written[row.id]) for row in known.run.rows]
    figures = {**error_figures(errors), **_busy_figures(busy), "requests": float(len(errors))}
    figures |= others.figures()
    figures["generator_late_p99_ms"] = round(percentile([row.late_s for row in known.run.rows], 99) * 1e3, 3)
    print(_table(figures))
    if others.ttft_s:
        print(f"\n{others.text()}")
    print(f"\n{goal_table(figures, (*GOALS, *selfcheck_clients.GOALS))}")
    for objection in known.objections:
        print(f"  NOT VALID: {objection.text}")
    rows: list[dict[str, Any]] = [{"n": row.n, **_plain(one)} for row, one in zip(known.run.rows, errors, strict=True)]
    rows += [
        {"client": client, "ttft_ms": [round(value * 1e3, 3) for value in values]}
        for client, values in others.ttft_s.items()
    ]
    rows += [{"client": client, "not_measured": why} for client, why in others.missing.items()]
    write(arguments.json, figures, env, rows)
    met = all(goal.met(figures[goal.figure]) for goal in GOALS)
    met = met and all(goal.met(figures[goal.figure]) for goal in selfcheck_clients.GOALS if goal.figure in figures)
    return 0 if known.valid and met else 1


def errors_of(row: RequestRecord, known: Known, written: Sequence[float]) -> Errors:
    """How far the generator's figures of one request are from the truth."""
    assert row.ttft_s is not None and row.tpot_s is not None, "the answer was whole and longer than a token"
    wrote_tpot_s = (written[-1] - written[0]) / (known.tokens - 1)
    return Errors(
        ttft_ms=abs(row.ttft_s - known.first_s) * 1e3,
        tpot_ms=abs(row.tpot_s - known.gap_s) * 1e3,
        ttft_to_written_ms=abs(row.ttft_s - (written[0] - row.due_s)) * 1e3,
        tpot_to_written_ms=abs(row.tpot_s - wrote_tpot_s) * 1e3,
    )


def error_figures(errors: Sequence[Errors]) -> dict[str, float]:
    """The mean of each error, and its 50th and 99th percentile."""
    found: dict[str, float] = {}
    for name in ("ttft", "tpot", "ttft_to_written", "tpot_to_written"):
        values = [getattr(one, f"{name}_ms") for one in errors]
        short = name.replace("_to_written", "_error_to_written") if "written" in name else f"{name}_error"
        found[f"{short}_ms"] = round(statistics.fmean(values), 4)
        found |= {f"{short}_p{percent}_ms": round(percentile(values, percent), 4) for percent in (50, 99)}
    return found


def _busy_figures(busy: Measured) -> dict[str, float]:
    run, count = busy.run, len(busy.run.rows)
    return {
        "generator_rps_per_core": round(count / run.cpu_s, 1),
        "generator_cpu_us_per_request": round(run.cpu_s / count * 1e6, 1),
        "busy_rps": round(count / (run.ended_s - run.begun_s), 1),
        "busy_core_share": round(run.cpu_s / (run.ended_s - run.begun_s), 3),
    }


def _sent(url: str, arrivals: Arrivals, known: Sequence[Known], seconds: float, *, pad: int) -> Measured:
    """A run of bodies that ask for these answers in turn."""
    plan = Plan(arrivals, seconds=seconds, slos=())
    with prepared(_bodies(known, pad)) as asks:
        return event_loop.run(measure(Target(url), asks, plan))


def _bodies(known: Sequence[Known], pad: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, one in enumerate(known):
        content = "x" * max(0, pad - 200)
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "known": msgspec.to_builtins(one)}
        yield f"known-{number}", streamed({**body, "max_tokens": one.tokens, "ignore_eos": True})


def _plain(errors: Errors) -> dict[str, float]:
    return {name: round(getattr(errors, name), 4) for name in Errors.__dataclass_fields__}


def _table(figures: Mapping[str, float]) -> str:
    rows: list[tuple[str, ...]] = [("error in ms", "mean", "p50", "p99")]
    for name, title in (
        ("ttft_error", "TTFT, to the known delay"),
        ("tpot_error", "TPOT, to the known gap"),
        ("ttft_error_to_written", "TTFT, to when the server wrote"),
        ("tpot_error_to_written", "TPOT, to when the server wrote"),
    ):
        rows.append((title, *(f"{figures[f'{name}{part}_ms']:.3f}" for part in ("", "_p50", "_p99"))))
    busy = (
        f"  {figures['busy_rps']:.0f} requests/s with bodies of {BODY_BYTES // 1000} KB and {BUSY.tokens} tokens took "
        f"{figures['busy_core_share']:.2f} of a core: {figures['generator_rps_per_core']:.0f} requests/s per core"
    )
    return f"{table(rows)}\n{busy}"
