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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.client.bodies import file_bodies
from bench.client.goodput import Search
from bench.client.measure import Plan
from bench.client.rows_file import RowsFile
from bench.client.run import Bounds
from bench.client.slo import PAPER, parse_slos
from bench.client.source import FileSource, Source, WorkloadSource
from bench.client.sweep import Found, Sweep
from bench.client.target import Target
from bench.client.validity import Rules
from bench.record import add_arguments as add_record_arguments
from bench.record import environment
from bench.workloads.arrivals import Arrivals, ClosedLoop, Trace, parse_arrivals
from bench.workloads.own import NAME as OWN
from bench.workloads.pictures import Pictures
from bench.workloads.spec import RequestSpec
from bench.workloads.workload import Workload, add_content_arguments, workload
from deploy import event_loop
from epd_serve.errors import ConfigError

DURATION_S, QUICK_S = 60.0, 10.0
SPARE_FILES = 256
"""Open files for everything but connections."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="http://HOST:PORT of an OpenAI server")
    what = parser.add_argument_group("what is sent")
    what.add_argument("--workload", metavar="NAME", help=f"one of `epd-bench workload --list`, or {OWN!r}")
    add_content_arguments(what)
    what.add_argument("--seed", type=int, default=0, help="another seed, other texts, pictures and arrivals")
    what.add_argument("--same", action="store_true", help="every run of a sweep has the requests of the first")
    what.add_argument("--bodies", type=Path, metavar="FILE", help="instead: request bodies, one JSON object per line")
    what.add_argument("--model", help="default: the one that the endpoint serves")
    what.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="with every request")
    what.add_argument("--no-explain", action="store_true", help="do not ask our proxy for each request's path")
    when = parser.add_argument_group("when")
    when.add_argument("--rate", metavar="R", help="requests a second: R, R,R,… or FROM-TO[:STEP], a run of each")
    when.add_argument("--arrivals", default="poisson", metavar="FORM", help="poisson, gamma:CV, trace:FILE")
    when.add_argument("--concurrency", type=int, metavar="C", help="a closed loop of so many instead")
    when.add_argument("--duration", type=float, metavar="S", help=f"of a run (default {DURATION_S:g} s; none with --n)")
    when.add_argument("--n", type=int, help="requests of a run, instead of or beside --duration")
    when.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (default 600 s)")
    when.add_argument("--cancel", metavar="SHARE:S", help="so many clients leave, each within S seconds")
    judged = parser.add_argument_group("how it is judged")
    judged.add_argument("--slo", help="TTFT:TPOT in ms, several with commas (default the papers' three)")
    judged.add_argument("--devices", type=int, help="that serve the endpoint; gives figures per device")
    judged.add_argument("--warm-up", type=float, metavar="S", help="not counted (default a tenth of the run)")
    judged.add_argument("--min-samples", type=int, default=Rules().min_samples, help="good answers that a run needs")
    judged.add_argument("--late-ms", type=float, default=Rules().late_ms, help="by which the generator may be late")
    judged.add_argument("--find-goodput", type=float, metavar="SHARE", help="search the rate that so many attain")
    judged.add_argument("--tolerance", type=float, default=0.1, help="of that rate (default 0.1)")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--rows", type=Path, metavar="FILE", help="every request as a JSON line (default beside --json)")
    kept.add_argument("--traces", type=Path, metavar="DIR", help="phase stamps of an `epd-serve serve` on this host")
    kept.add_argument("--kind", choices=("real", "emulated", "simulated"), default="real", help="what serves")
    add_record_arguments(parser, quick=f"runs of {QUICK_S:g} s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, keep. Returns 0, 1 where a run is not valid, 128 + signal where one ended it."""
    plan, wanted = plan_of(arguments), _workload(arguments)
    rates = rates_of(arguments, wanted.own if wanted else ())
    headers = dict(_header(word) for word in arguments.header)
    target = Target(arguments.url, headers if arguments.no_explain else {"x-epd-explain": "1", **headers})
    model = event_loop.run(_model(target, arguments.model))
    source = _source(arguments, wanted, model)
    env = environment(argv, kind=arguments.kind)
    env["load"] = {
        "url": str(target.endpoint),
        "model": model,
        "workload": arguments.workload or f"bodies of {arguments.bodies.name}",
        "seed": plan.seed,
        "devices": plan.devices,
        "slos": [str(slo) for slo in plan.slos],
        "client_on_the_servers_host": _is_here(target.endpoint.host),
    }
    rows_path = arguments.rows or (arguments.json and arguments.json.with_suffix(".rows.jsonl"))
    phases = rows_path.with_suffix(".phases.jsonl") if rows_path and arguments.traces else None
    if phases is not None:
        phases.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        rows = stack.enter_context(RowsFile(rows_path)) if rows_path else None
        sweep = Sweep(
            target,
            source,
            plan,
            keep=rows.keep if rows else None,
            traces=arguments.traces,
            phases=phases,
            json_path=arguments.json,
            env=env,
        )
        try:
            found = _measured(arguments, sweep, rates)
        except KeyboardInterrupt:  # between two runs, while requests are made
            found = sweep.found
            found.signal = 2
    return _exit_code(found)


def _measured(arguments: argparse.Namespace, sweep: Sweep, rates: Sequence[Arrivals]) -> Found:
    if arguments.find_goodput is None:
        return sweep.rates(rates)
    (first,) = rates
    start = getattr(first, "rate_rps", None)
    if start is None:
        raise ConfigError("--find-goodput searches rates: say --rate R to begin with", param="--find-goodput")
    slo = (parse_slos(arguments.slo) if arguments.slo else PAPER)[0]
    search = Search(arguments.find_goodput, start, tolerance=arguments.tolerance)
    return sweep.goodput(_arrivals(arguments.arrivals), search, arguments.find_goodput, slo)


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


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What the flags say of each run. Raises ConfigError naming the flag at fault."""
    for flag in ("duration", "n", "timeout", "devices", "min_samples", "late_ms", "tolerance"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')} is {value:g}: above 0", param=f"--{flag}")
    if arguments.warm_up is not None and arguments.warm_up < 0:
        raise ConfigError("--warm-up is below 0", param="--warm-up")
    if arguments.find_goodput is not None and not 0 < arguments.find_goodput < 1:
        raise ConfigError(f"--find-goodput is {arguments.find_goodput:g}: a share, as 0.9", param="--find-goodput")
    share, within_s = _cancel(arguments.cancel)
    seconds = arguments.duration
    if seconds is None and arguments.n is None:
        seconds = QUICK_S if arguments.quick else DURATION_S
    return Plan(
        ClosedLoop(1),  # each run has its own
        count=arguments.n,
        seconds=seconds,
        seed=arguments.seed,
        warm_up_s=arguments.warm_up,
        slos=parse_slos(arguments.slo) if arguments.slo else PAPER,
        devices=arguments.devices,
        leave_share=share,
        leave_within_s=within_s,
        rules=Rules(arguments.min_samples, arguments.late_ms),
        bounds=Bounds(limit_s=arguments.timeout, at_once=_connections()),
    )


def rates_of(arguments: argparse.Namespace, own: Sequence[RequestSpec] = ()) -> list[Arrivals]:
    """The arrivals of each run.

    Args:
        own: the user's requests, whose times hold where no flag says another rate.

    Raises:
        ConfigError: naming the flag at fault.
    """
    if arguments.concurrency is not None:
        if arguments.rate is not None or arguments.find_goodput is not None:
            raise ConfigError("--concurrency is a closed loop: it has no --rate and no goodput", param="--concurrency")
        return [ClosedLoop(arguments.concurrency)]
    make = _arrivals(arguments.arrivals)
    if arguments.rate is None:
        if arguments.arrivals.startswith("trace:") and arguments.find_goodput is None:
            return [parse_arrivals(arguments.arrivals)]
        if (times := [one.arrival_s for one in own if one.arrival_s is not None]) and arguments.find_goodput is None:
            return [Trace(times)]
        raise ConfigError("say how fast: --rate R, or --concurrency C", param="--rate")
    rates = _rates(arguments.rate)
    if arguments.find_goodput is not None and len(rates) > 1:
        raise ConfigError("--find-goodput begins at one --rate", param="--rate")
    return [make(rate) for rate in rates]


def _arrivals(form: str) -> Callable[[float], Arrivals]:
    """Arrivals of a form at a rate."""
    kind, _, rest = form.partition(":")

    def at(rate: float) -> Arrivals:
        if kind == "gamma":
            return parse_arrivals(f"gamma:{rate}:{rest}")
        if kind == "trace":
            return parse_arrivals(f"trace:{rest}:{rate}")
        if form != "poisson":
            raise ConfigError(f"--arrivals {form}: poisson, gamma:CV or trace:FILE", param="--arrivals")
        return parse_arrivals(f"poisson:{rate}")

    return at


def _rates(text: str) -> list[float]:
    """`R`, `R,R,…` or `FROM-TO[:STEP]`."""
    wrong = ConfigError(f"--rate {text}: a number above 0, several with commas, or FROM-TO[:STEP]", param="--rate")
    try:
        if "-" not in text:
            found = [float(word) for word in text.split(",")]
        else:
            span, _, step_text = text.partition(":")
            low, high = (float(word) for word in span.split("-"))
            step = float(step_text or 1)
            if not (step > 0 and high >= low and (high - low) / step < 1000):
                raise wrong
            found = [round(low + step * turn, 6) for turn in range(int((high - low) / step + 1e-9) + 1)]
    except ValueError:
        raise wrong from None
    if not all(0 < rate < float("inf") for rate in found):
        raise wrong
    return found


def _cancel(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 1.0
    share, _, within = text.partition(":")
    try:
        found = float(share), float(within)
    except ValueError:
        found = -1.0, 0.0
    if not (0 <= found[0] <= 1 and 0 < found[1] < float("inf")):
        raise ConfigError(f"--cancel {text}: SHARE:SECONDS, as 0.1:2", param="--cancel")
    return found


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
