"""`epd-bench load`: send requests to an OpenAI endpoint, and say what its clients would have seen.

Times to first token count from when a request was due, on the first content that is not empty. A run that says nothing
about the server (no good answer, too few, a generator that was late, an endpoint that died) ends with exit code 1 and
says why; Ctrl-C keeps what there is, with 130. Run this away from the server's cores, or remember that it shares them.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench.client.bodies import file_bodies
from bench.client.experiment import experiment
from bench.client.flags import add_flags, arrivals_at, plan_of, rates_of
from bench.client.goodput import Search
from bench.client.resume import Earlier, keep_runs, read_earlier
from bench.client.rows_file import RowsFile
from bench.client.run import Bounds
from bench.client.slo import PAPER, parse_slos
from bench.client.source import FileSource, Source, WorkloadSource
from bench.client.sweep import Found, Sweep, labels
from bench.client.target import Target
from bench.record import environment
from bench.workloads.arrivals import Arrivals
from bench.workloads.pictures import Pictures
from bench.workloads.spec import RequestSpec
from bench.workloads.workload import Workload, workload
from deploy import event_loop
from epd_serve.errors import ConfigError

SPARE_FILES = 256
"""Open files for everything but connections."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, keep. Returns 0, 1 where a run is not valid, 128 + signal where one ended it."""
    plan, wanted = plan_of(arguments), _workload(arguments)
    plan = replace(plan, bounds=replace(plan.bounds, at_once=_connections()))
    rates = rates_of(arguments, wanted.own if wanted else ())
    headers = dict(_header(word) for word in arguments.header)
    target = Target(arguments.url, headers if arguments.no_explain else {"x-epd-explain": "1", **headers})
    model = event_loop.run(_model(target, arguments.model))
    source = _source(arguments, wanted, model)
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
        rows = stack.enter_context(RowsFile(rows_path, append=earlier is not None)) if rows_path else None
        sweep = Sweep(
            target,
            source,
            plan,
            keep=rows.keep if rows else None,
            traces=arguments.traces,
            phases=phases,
            json_path=arguments.json,
            env=env,
            earlier=earlier,
        )
        try:
            found = _measured(arguments, sweep, rates)
        except KeyboardInterrupt:  # between two runs, while requests are made
            found = sweep.found
            found.signal = 2
    return _exit_code(found)


def _earlier(arguments: argparse.Namespace, env: dict[str, Any], named: Sequence[str]) -> Earlier:
    """The runs that are there; `env` gets to know under what they were measured."""
    found = read_earlier(arguments.json, env["load"]["experiment"], named)
    if not found.rows:
        print(f"{arguments.json}: nothing there to go on with", flush=True)
        return found
    keys = ("date", "commit", "uncommitted_changes", "machine", "versions")
    env["resumed"] = [
        *found.env.get("resumed", ()),
        {"runs": sorted(found.runs)} | {key: found.env[key] for key in keys},
    ]
    for key in ("commit", "uncommitted_changes", "versions"):
        if found.env[key] != env[key]:
            print(f"another {key.replace('_', ' ')} than before: {found.env[key]}, now {env[key]}", flush=True)
    return found


def _measured(arguments: argparse.Namespace, sweep: Sweep, rates: Sequence[Arrivals]) -> Found:
    if arguments.find_goodput is None:
        return sweep.rates(rates)
    (first,) = rates
    start = getattr(first, "rate_rps", None)
    if start is None:
        raise ConfigError("--find-goodput searches rates: say --rate R to begin with", param="--find-goodput")
    slo = (parse_slos(arguments.slo) if arguments.slo else PAPER)[0]
    search = Search(arguments.find_goodput, start, tolerance=arguments.tolerance)
    return sweep.goodput(arrivals_at(arguments.arrivals), search, arguments.find_goodput, slo)


def _exit_code(found: Found) -> int:
    if found.signal:
        print("epd-bench: interrupted; what was measured until then is above and in the files", file=sys.stderr)
        return 128 + found.signal
    if found.over:
        print(f"epd-bench: {found.over}", file=sys.stderr)
        return 1
    if not found.valid:
        why = [text for row in found.rows for text in row["objections"]] or ["no rate meets the target"]
        print(f"epd-bench: not valid: {why[0]}", file=sys.stderr)
        return 1
    return 0


def _header(word: str) -> tuple[str, str]:
    name, colon, value = word.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"--header {word!r}: NAME:VALUE", param="--header")
    return name.strip().lower(), value.strip()


async def _model(target: Target, named: str | None) -> str:
    """The model to ask for. Asks the endpoint in any case, so that one that is down is known before anything else."""
    served = await target.models()
    if named is None and not served:
        raise ConfigError(f"{target.endpoint} serves no model: say --model", param="--model")
    return named or served[0]


def _workload(arguments: argparse.Namespace) -> Workload | None:
    """The workload, without arrivals; None where bodies are given. Raises ConfigError naming the flag at fault."""
    if (arguments.workload is None) == (arguments.bodies is None):
        raise ConfigError("say what to send: --workload NAME, or --bodies FILE", param="--workload")
    if arguments.workload is None:
        return None
    return workload(arguments.workload, arguments)


def _source(arguments: argparse.Namespace, wanted: Workload | None, model: str) -> Source:
    if wanted is None:
        return FileSource(file_bodies(arguments.bodies, model))

    def specs(seed: int) -> Iterator[RequestSpec]:
        return replace(wanted, knobs=replace(wanted.knobs, seed=seed)).endless()

    same = arguments.same or bool(wanted.own)
    return WorkloadSource(specs, Pictures(arguments.cache).data_url, model, arguments.seed, repeats=same)


def _connections() -> int:
    """How many requests may be under way: as many as this process may open files for, up to the usual bound."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = Bounds().at_once + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return Bounds().at_once if soft == resource.RLIM_INFINITY else min(Bounds().at_once, max(soft - SPARE_FILES, 16))


def _is_here(host: str) -> bool:
    """The endpoint is on this machine, by its address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in ("localhost", os.uname().nodename)
