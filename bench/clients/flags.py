"""The flags of `epd-bench load`, and what they say of its runs. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.clients.measure import Plan, Rules
from bench.clients.sender import Bounds
from bench.clients.slo import PAPER
from bench.record import add_arguments as add_record_arguments
from bench.workloads.requests import Arrivals, ClosedLoop, Poisson, RequestSpec, Trace
from bench.workloads.workload import RECORDED, add_content_arguments
from epd_serve.errors import ConfigError
from epd_serve.slo import parse_slos

DURATION_S, QUICK_S = 60.0, 10.0


Group = argparse._ArgumentGroup


def add_shared_flags(
    parser: argparse.ArgumentParser, *, late_ms: float, timeout_s: float, workload: str | None = None
) -> tuple[Group, Group, Group]:
    """The flags of every command that loads a server: what is sent, how much of it, and how it is judged."""
    what = parser.add_argument_group("what is sent")
    usual = f" (default {workload})" if workload else ""
    named = f"one of `epd-bench workload --list`, or {RECORDED}FILE of a deployment{usual}"
    what.add_argument("--workload", default=workload, metavar="NAME", help=named)
    add_content_arguments(what)
    what.add_argument("--seed", type=int, default=0, help="another seed, other texts, images and arrivals")
    when = parser.add_argument_group("when")
    when.add_argument("--n", type=int, metavar="N", help="requests of a run")
    when.add_argument(
        "--timeout", type=float, default=timeout_s, metavar="S", help=f"of one request (default {timeout_s:g} s)"
    )
    judged = parser.add_argument_group("how it is judged")
    judged.add_argument(
        "--slo",
        type=parse_slos,
        default=PAPER,
        metavar="TTFT:TPOT[:JUDGE]",
        help="in ms, JUDGE of token gaps p90, p99 or mean; several with commas (default the papers' three)",
    )
    judged.add_argument(
        "--min-samples", type=int, metavar="N", help=f"good answers that a run needs (default {Rules().min_samples})"
    )
    judged.add_argument(
        "--late-ms",
        type=float,
        default=late_ms,
        metavar="MS",
        help=f"by which it may be sent late (default {late_ms:g})",
    )
    return what, when, judged


def add_run_flags(when: Group, judged: Group) -> None:
    """The flags of runs that we send ourselves."""
    when.add_argument("--duration", type=float, metavar="S", help=f"of a run (default {DURATION_S:g} s; none with --n)")
    judged.add_argument("--warm-up", type=float, metavar="S", help="of a run, not counted (default a tenth of it)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `epd-bench load`."""
    parser.add_argument("url", metavar="URL", help="http://HOST:PORT of an OpenAI server")
    what, when, judged = add_shared_flags(parser, late_ms=Rules().late_ms, timeout_s=600.0)
    add_run_flags(when, judged)
    what.add_argument("--same", action="store_true", help="every run of a sweep has the requests of the first")
    what.add_argument("--bodies", type=Path, metavar="FILE", help="instead: request bodies, one JSON object per line")
    what.add_argument("--model", help="default: the one that the endpoint serves")
    what.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="with every request")
    when.add_argument("--rate", metavar="R", help="requests a second: R, R,R,… or FROM-TO[:STEP], a run of each")
    when.add_argument("--concurrency", type=int, metavar="C", help="a closed loop of so many instead")
    judged.add_argument("--devices", type=int, help="that serve the endpoint; gives figures per device")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--rows", type=Path, metavar="FILE", help="every request as a JSON line (default beside --json)")
    kept.add_argument("--traces", type=Path, metavar="DIR", help="phase stamps of an `epd-serve serve` on this host")
    kept.add_argument("--kind", choices=("real", "emulated", "simulated"), default="real", help="what serves")
    add_record_arguments(parser, quick=f"runs of {QUICK_S:g} s")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What the flags say of each run. Raises ConfigError naming the flag at fault."""
    check_shared(arguments)
    return Plan(
        ClosedLoop(1),  # each run has its own
        count=arguments.n,
        seconds=duration_of(arguments),
        seed=arguments.seed,
        warm_up_s=arguments.warm_up,
        slos=arguments.slo,
        devices=arguments.devices,
        rules=rules_of(arguments),
        bounds=Bounds(limit_s=arguments.timeout),
    )


def duration_of(arguments: argparse.Namespace) -> float | None:
    """Seconds of a run; None where a count alone ends it."""
    if arguments.duration is not None or arguments.n is not None:
        duration_s: float | None = arguments.duration
        return duration_s
    return QUICK_S if arguments.quick else DURATION_S


def rules_of(arguments: argparse.Namespace) -> Rules:
    return Rules(arguments.min_samples or Rules().min_samples, arguments.late_ms)


def check_shared(arguments: argparse.Namespace) -> None:
    """Raises ConfigError where a flag that is given is not above 0."""
    for name in ("duration", "n", "timeout", "devices", "min_samples", "late_ms", "warm_up"):
        value, flag = getattr(arguments, name, None), f"--{name.replace('_', '-')}"
        if value is not None and not (0 < value < float("inf") or (value == 0 and name == "warm_up")):
            raise ConfigError(f"{flag} is {value:g}: above 0", param=flag)


def rates_of(arguments: argparse.Namespace, own: Sequence[RequestSpec] = ()) -> list[Arrivals]:
    """The arrivals of each run.

    Args:
        own: the user's requests, whose times hold where no flag says another rate.

    Raises:
        ConfigError: naming the flag at fault.
    """
    if arguments.concurrency is not None:
        if arguments.rate is not None:
            raise ConfigError("--concurrency is a closed loop: it has no --rate", param="--concurrency")
        return [ClosedLoop(arguments.concurrency)]
    if arguments.rate is not None:
        return [Poisson(rate) for rate in parse_rates(arguments.rate)]
    times = [one.arrival_s for one in own if one.arrival_s is not None]
    if not times:
        raise ConfigError("say how fast: --rate R, or --concurrency C", param="--rate")
    return [Trace(times)]


def parse_rates(text: str, flag: str = "--rate") -> list[float]:
    """`R`, `R,R,…` or `FROM-TO[:STEP]`. Raises ConfigError naming `flag`."""
    wrong = ConfigError(f"{flag} {text}: a number above 0, several with commas, or FROM-TO[:STEP]", param=flag)
    try:
        if "-" not in text:
            rates = [float(word) for word in text.split(",")]
        else:
            span, _, step_text = text.partition(":")
            low, high = (float(word) for word in span.split("-"))
            step = float(step_text or 1)
            if not (step > 0 and high >= low and (high - low) / step < 1000):
                raise wrong
            rates = [round(low + step * turn, 6) for turn in range(int((high - low) / step + 1e-9) + 1)]
    except ValueError:
        raise wrong from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise wrong
    return rates


def header_of(word: str) -> tuple[str, str]:
    """`NAME:VALUE`. Raises ConfigError."""
    name, colon, value = word.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"--header {word!r}: NAME:VALUE", param="--header")
    return name.strip().lower(), value.strip()
