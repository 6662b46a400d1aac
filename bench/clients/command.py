"""`epd-bench load`: send requests to an OpenAI endpoint, and say what its clients would have seen.

Times to first token count from when a request was due, on the first content that is not empty. A run that says nothing
about the server (no good answer, too few, a sender that was late, an endpoint that died) ends with exit code 1 and says
why; Ctrl-C keeps what there is, with 130. Run this away from the server's cores, or remember that it shares them.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.clients.bodies import FileSource, Source, WorkloadSource, file_bodies
from bench.clients.flags import add_flags, arrivals_at, header_of, plan_of, rates_of
from bench.clients.goodput import Search
from bench.clients.records import RecordsFile
from bench.clients.resume import Earlier, experiment, keep_runs, read_earlier
from bench.clients.sender import Bounds
from bench.clients.sweep import Sweep, SweepResult, labels
from bench.clients.target import Target
from bench.record import environment
from bench.workloads.arrivals import Arrivals
from bench.workloads.images import Images
from bench.workloads.workload import Workload, workload
from deploy import event_loop
from epd_serve.errors import ConfigError

SPARE_FILES = 256
"""Open files for everything but connections."""
PLACE = ("date", "commit", "uncommitted_changes", "machine", "versions")
"""Of an earlier sweep's environment, what its runs are remembered with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, keep. Returns 0, 1 where a run is not valid, 128 + signal where one ended it."""
    if (arguments.workload is None) == (arguments.bodies is None):
        raise ConfigError("say what to send: --workload NAME, or --bodies FILE", param="--workload")
    plan, wanted = plan_of(arguments), workload(arguments.workload, arguments) if arguments.workload else None
    plan = replace(plan, bounds=replace(plan.bounds, concurrency=_connections()))
    rates = rates_of(arguments, wanted.own if wanted else ())
    headers = dict(map(header_of, arguments.header))
    target = Target(arguments.url, headers if arguments.no_explain else {"x-epd-explain": "1", **headers})
    served = event_loop.run(target.models())  # in any case, so that an endpoint that is down is known at once
    if not (arguments.model or served):
        raise ConfigError(f"{target.endpoint} serves no model: say --model", param="--model")
    model = arguments.model or served[0]
    env = environment(argv, kind=arguments.kind, asked=arguments)
    env["load"] = {
        "url": str(target.endpoint),
        "model": model,
        "workload": arguments.workload or f"bodies of {arguments.bodies.name}",
        "seed": plan.seed,
        "devices": plan.devices,
        "slos": [str(slo) for slo in plan.slos],
        "client_on_the_servers_host": _is_here(target.endpoint.host),
        "experiment": experiment(arguments, plan, model),
    }
    earlier = _earlier(arguments, env, labels(rates)) if arguments.resume else None
    rows_path = arguments.rows or (arguments.json and arguments.json.with_suffix(".rows.jsonl"))
    phases = rows_path.with_suffix(".phases.jsonl") if rows_path and arguments.traces else None
    if earlier is not None:
        for path in filter(None, (rows_path, phases)):
            keep_runs(path, earlier.runs)
    elif phases is not None:
        phases.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(RecordsFile(rows_path, append=earlier is not None)) if rows_path else None
        sweep = Sweep(
            target,
            _source(arguments, wanted, model),
            plan,
            keep=records.keep if records else None,
            traces=arguments.traces,
            phases=phases,
            json_path=arguments.json,
            env=env,
            earlier=earlier,
        )
        try:
            result = _measured(arguments, sweep, rates)
        except KeyboardInterrupt:  # between two runs, while requests are made
            result = sweep.result
            result.signal = 2
    return _exit_code(result)


def _earlier(arguments: argparse.Namespace, env: dict[str, Any], named: Sequence[str]) -> Earlier:
    """The runs that are there; `env` gets to know under what they were measured."""
    earlier = read_earlier(arguments.json, env["load"]["experiment"], named)
    if not earlier.rows:
        print(f"{arguments.json}: nothing there to go on with", flush=True)
        return earlier
    before = {"runs": sorted(earlier.runs)} | {key: earlier.env[key] for key in PLACE}
    env["resumed"] = [*earlier.env.get("resumed", ()), before]
    for key in ("commit", "uncommitted_changes", "versions"):
        if earlier.env[key] != env[key]:
            print(f"another {key.replace('_', ' ')} than before: {earlier.env[key]}, now {env[key]}", flush=True)
    return earlier


def _source(arguments: argparse.Namespace, wanted: Workload | None, model: str) -> Source:
    if wanted is None:
        return FileSource(file_bodies(arguments.bodies, model))
    repeats = arguments.same or bool(wanted.own)
    data_url = Images(arguments.cache).data_url
    return WorkloadSource(lambda seed: wanted.seeded(seed).endless(), data_url, model, arguments.seed, repeats)


def _measured(arguments: argparse.Namespace, sweep: Sweep, rates: Sequence[Arrivals]) -> SweepResult:
    if arguments.find_goodput is None:
        return sweep.rates(rates)
    start = getattr(rates[0], "rate_rps", None)
    if start is None:
        raise ConfigError("--find-goodput searches rates: say --rate R to begin with", param="--find-goodput")
    search = Search(arguments.find_goodput, start, tolerance=arguments.tolerance)
    return sweep.goodput(arrivals_at(arguments.arrivals), search, arguments.find_goodput)


def _exit_code(result: SweepResult) -> int:
    why = ""
    if result.signal:
        why = "interrupted; what was measured until then is above and in the files"
    elif result.over:
        why = result.over
    elif not result.valid:
        why = "not valid: " + next(
            (text for row in result.rows for text in row["objections"]), "no rate meets the target"
        )
    if why:
        print(f"epd-bench: {why}", file=sys.stderr)
    return 128 + result.signal if result.signal else int(bool(why))


def _connections() -> int:
    """How many requests may be under way: as many as this process may open files for, up to the usual bound."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = Bounds().concurrency + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted - SPARE_FILES if soft == resource.RLIM_INFINITY else min(wanted, max(soft, 272)) - SPARE_FILES


def _is_here(host: str) -> bool:
    """The endpoint is on this machine, by its address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in ("localhost", os.uname().nodename)
