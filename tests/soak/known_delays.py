"""`python -m tests.soak.known_delays`: how far the request sender can be trusted.

It is held against a server whose every delay is known, which runs in a process of its own. Errors are absolute
differences between what the sender reports of a request and the delays that the request asked for, so the server's own
lateness and the way between both are in them too; the same against the moments at which the server says it wrote are
beside them. Requests per core are of the sender's own CPU time, with a body and an answer of usual size, each token an
event that is read by itself.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from bench.clients.bodies import streamed
from bench.clients.measure import Measured, Plan
from bench.clients.measure import measure as sent_by_plan
from bench.clients.process import Child
from bench.clients.results import RequestRecord
from bench.clients.target import Target, requests
from bench.micro.measurement import Goal
from bench.statistic import percentile
from bench.workloads.requests import Arrivals, ClosedLoop, Poisson
from deploy.host import event_loop
from epd_serve.errors import StageError
from tests.soak.harness import Result, Soak
from tests.soak.known_server import MODEL, Known

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
CONCURRENCY = 64
GOALS = (
    Goal("ttft_error_ms", "<=", 2.0, "known delays, 50 requests a second: the mean"),
    Goal("tpot_error_ms", "<=", 2.0, "known delays, 50 requests a second: the mean"),
    Goal("objections", "==", 0, "the machine was not too busy to tell"),
    Goal("generator_rps_per_core", ">=", 500.0, "bodies of 20 KB, 64 tokens one by one"),
)
ERRORS = ("ttft_error", "tpot_error", "ttft_error_to_written", "tpot_error_to_written")
"""In milliseconds: to the known delay and gap, and to when the server says that it wrote."""


def measure(arguments: argparse.Namespace) -> Result:
    """Both parts. A run that the machine was too busy for counts as one that is not valid."""
    seconds = QUICK_S if arguments.quick else PART_S
    server = Child("tests.soak.known_server")
    try:
        url = server.hear()
        known = _sent(url, Poisson(RATE_RPS), KNOWN, seconds, pad=0)
        written = server.ask(True)
        busy = _sent(url, ClosedLoop(CONCURRENCY), (BUSY,), seconds, pad=BODY_BYTES)
    finally:
        server.stop()
    errors = [errors_of(one, KNOWN[one.n % len(KNOWN)], written[one.id]) for one in known.run.rows]
    figures = {**error_figures(errors), **_busy_figures(busy), "requests": float(len(errors))}
    figures["generator_late_p99_ms"] = round(percentile([one.late_s for one in known.run.rows], 99) * 1e3, 3)
    figures["objections"] = float(len(known.objections))
    rows = [
        {"n": record.n, **{f"{name.replace('_error', '')}_ms": round(error, 4) for name, error in one.items()}}
        for record, one in zip(known.run.rows, errors, strict=True)
    ]
    return figures, rows, "\n".join(f"NOT VALID: {objection.text}" for objection in known.objections)


def errors_of(record: RequestRecord, known: Known, written: Sequence[float]) -> dict[str, float]:
    """How far the sender's figures of one request are from the truth, in milliseconds, by the names of `ERRORS`."""
    assert record.ttft_s is not None and record.tpot_s is not None, "the answer was whole and longer than a token"
    wrote_tpot_s = (written[-1] - written[0]) / (known.tokens - 1)
    seconds = (
        record.ttft_s - known.first_s,
        record.tpot_s - known.gap_s,
        record.ttft_s - (written[0] - record.due_s),
        record.tpot_s - wrote_tpot_s,
    )
    return {name: abs(error) * 1e3 for name, error in zip(ERRORS, seconds, strict=True)}


def error_figures(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each error, and its 50th and 99th percentile."""
    figures: dict[str, float] = {}
    for name in ERRORS:
        values = [one[name] for one in errors]
        figures[f"{name}_ms"] = round(sum(values) / len(values), 4)
        figures |= {f"{name}_p{percent}_ms": round(percentile(values, percent), 4) for percent in (50, 99)}
    return figures


def _busy_figures(busy: Measured) -> dict[str, float]:
    run, count = busy.run, len(busy.run.rows)
    return {
        "generator_rps_per_core": round(count / run.cpu_s, 1),
        "generator_cpu_us_per_request": round(run.cpu_s / count * 1e6, 1),
        "busy_rps": round(count / (run.ended_s - run.begun_s), 1),
        "busy_core_share": round(run.cpu_s / (run.ended_s - run.begun_s), 3),
    }


def _sent(url: str, arrivals: Arrivals, known: Sequence[Known], seconds: float, *, pad: int) -> Measured:
    """A run of bodies that ask for these answers in turn. Raises StageError where one was not whole."""
    messages = [{"role": "user", "content": "x" * max(0, pad - 200)}]
    bodies = [
        streamed({"model": MODEL, "messages": messages, "known": msgspec.to_builtins(one), "ignore_eos": True})
        | {"max_tokens": one.tokens}
        for one in known
    ]
    measured = event_loop.run(sent_by_plan(Target(url), requests(bodies), Plan(arrivals, seconds=seconds, slos=())))
    wrong = [f"{one.outcome}: {one.fault} {one.error}" for one in measured.run.rows if not one.ok]
    if wrong:
        raise StageError(f"{len(wrong)} answers of the known server were not whole, the first: {wrong[0]}", stage=url)
    return measured


SOAK = Soak("known_delays", "how far the load generator can be trusted", measure, (), GOALS, kind="real client")

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
