"""`epd-bench load`: send requests to an OpenAI endpoint, and say what its clients would have seen.

Times to first token count from when a request was due, on the first content that is not empty. A run that says nothing
about the server (no good answer, too few, a sender that was late, an endpoint that died) ends with exit code 1 and says
why; Ctrl-C keeps what there is, with 130. Run this away from the server's cores, or remember that it shares them.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bench.clients.bodies import Source, file_requests, file_source, workload_source
from bench.clients.flags import add_flags, header_of, plan_of, rates_of
from bench.clients.measure import Plan
from bench.clients.results import RecordsFile, Results
from bench.clients.sweep import RunFound, labels, one_run
from bench.clients.target import Target
from bench.record import environment
from bench.workloads.images import Images
from bench.workloads.requests import Arrivals
from bench.workloads.workload import Workload, workload
from epd_serve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, keep. Returns 0, 1 where a run is not valid, 128 + signal where one ended it."""
    if (arguments.workload is None) == (arguments.bodies is None):
        raise ConfigError("say what to send: --workload NAME, or --bodies FILE", param="--workload")
    plan, wanted = plan_of(arguments), workload(arguments.workload, arguments) if arguments.workload else None
    rates = rates_of(arguments, wanted.own if wanted else ())
    target = Target(arguments.url, {"x-epd-explain": "1", **dict(map(header_of, arguments.header))})
    served = target.served()  # in any case, so that an endpoint that is down is known at once
    if not (arguments.model or served):
        raise ConfigError(f"{target.endpoint} serves no model: say --model", param="--model")
    model = arguments.model or served[0][0]
    source = _source(arguments, wanted, model)
    _open_many_files()
    env = environment(argv, kind=arguments.kind, asked=arguments)
    env["load"] = {
        "url": str(target.endpoint),
        "model": model,
        "workload": arguments.workload or f"bodies of {arguments.bodies.name}",
        "seed": plan.seed,
        "devices": plan.devices,
        "slos": [str(slo) for slo in plan.slos],
        "duration_s": plan.seconds,
        "count": plan.count,
        "client_on_the_servers_host": target.endpoint.local,
    }
    rows_path = arguments.rows or (arguments.json and arguments.json.with_suffix(".rows.jsonl"))
    phases_path = rows_path.with_suffix(".phases.jsonl") if rows_path and arguments.traces else None
    if phases_path:
        phases_path.unlink(missing_ok=True)
    results = Results(arguments.json, "--json", env)
    with RecordsFile(rows_path) if rows_path else contextlib.nullcontext() as records:
        keep = records.keep if records else None
        one = partial(one_run, target, source, keep=keep, traces=arguments.traces, phases_path=phases_path)
        return _sweep(one, plan, rates, results)


def _sweep(one: Callable[[Plan, str, int], RunFound], plan: Plan, rates: Sequence[Arrivals], results: Results) -> int:
    """A run of each rate, kept as it ends; which requests one has depends on its place alone. Returns the exit code."""
    ended_by, wrong = 0, ""
    try:
        for number, (label, arrivals) in enumerate(zip(labels(rates), rates, strict=True)):
            found = one(replace(plan, arrivals=arrivals, seed=plan.seed + number), label, number)
            ended_by = found.signal
            results.keep(found.row, found.figures)
            if wrong := found.over:
                break
    except KeyboardInterrupt:  # between two runs, while requests are made
        ended_by = signal.SIGINT
    if not wrong:
        wrong = next((f"not valid: {text}" for row in results.rows for text in row["objections"]), "")
    if ended_by:
        wrong = "interrupted; what was measured until then is above and in the files"
    if wrong:
        print(f"epd-bench: {wrong}", file=sys.stderr)
    return 128 + ended_by if ended_by else int(bool(wrong))


def _source(arguments: argparse.Namespace, wanted: Workload | None, model: str) -> Source:
    if wanted is None:
        return file_source(file_requests(arguments.bodies, model))
    repeats = arguments.same or bool(wanted.own)
    data_url = Images(arguments.cache).data_url
    return workload_source(wanted.endless_of, data_url, model, arguments.seed, repeats=repeats)


def _open_many_files() -> None:
    """A connection is an open file: as many as this process may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
