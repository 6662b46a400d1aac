"""`epd-bench ablations`: EPD-Serve's Table 2, E-P-D with and without asynchronous prefetching and grouped KV.

The baseline is up together with one variant at a time, and both get the same requests in turns, so that a ratio is of
two that met the same machine. Each round has new requests, since those of the round before would be served from the
stores; both have them at the same times, one after the other, in an order that is drawn for each round.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.analysis.page import require
from bench.clients.bodies import Source, WorkloadSource, prepared
from bench.clients.flags import parse_rates
from bench.clients.measure import Plan, measure
from bench.clients.records import RequestRecord
from bench.clients.target import Target
from bench.papers.printed import MACHINE
from bench.papers.table2 import BASELINE, LAYOUT, VARIANTS, Row, Variant, figures, tables, whole
from bench.real_stages import add_engine_flags, check_memory, engine_flags
from bench.record import add_arguments as add_record_arguments
from bench.record import busy, environment, write
from bench.scratch import scratch
from bench.served import served
from bench.workloads.arrivals import Poisson
from bench.workloads.generate import Knobs
from bench.workloads.images import Images
from bench.workloads.workload import Workload
from deploy import event_loop
from epd_serve.errors import ConfigError, StageError

WORKLOAD = "sharegpt4o-like"
STAGES = 6
"""Up at a time: two layouts of three."""
WARM_UP_REQUESTS, WARM_UP_NUMBER = 8, 1_000_000
"""Its number is beyond those of runs."""
LEAST_WHOLE = 0.9
"""Share of requests that both have to answer whole for the table to be a result."""

CANNOT = """\
What this can show here: what each switch costs or saves per request, on an engine that is hardly loaded. What it
cannot: a net gain from overlap. Two CPU cores do the computing and the copying; a transfer that hides behind a layer
takes that layer's core. The paper's gains come from copy engines and links that work beside the computing units."""


@dataclass(frozen=True)
class Rounds:
    """How much is sent. `plan`: of one run, but for its rate and seed. `count`: of each rate."""

    plan: Plan
    rates: Sequence[float]
    count: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", default="0.5,1", help="requests a second, with commas (default 0.5,1)")
    parser.add_argument("--rounds", type=int, help="of each rate, in turns (default 4, quick 2)")
    parser.add_argument("--seconds", type=float, help="of a run (default 30, quick 15)")
    parser.add_argument("--only", default=",".join(one.name for one in VARIANTS), help="variants, with commas")
    parser.add_argument("--output-tokens", type=int, default=32, help="of an answer (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and arrivals")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where drawn images are kept")
    add_engine_flags(parser)
    add_record_arguments(parser, quick="2 rounds of 15 s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, write; what was measured is kept however it ends. 1 where answers are missing."""
    require(["scipy"])
    rounds, variants = rounds_of(arguments), variants_of(arguments.only)
    kind = "real stages" if arguments.engine == "vllm" else "simulated stages: to try the flow"
    if arguments.engine == "vllm":
        check_memory(STAGES)
    env = environment(argv, kind, asked=arguments)
    env |= {"layout": LAYOUT, "flags": {one.name: list(one.flags) for one in (BASELINE, *variants)}}
    rows: list[Row] = []
    try:
        rows.extend(_measured(arguments, rounds, variants))  # one by one: an error keeps those before it
    finally:
        results = figures(rows, arguments.seed)
        if rows:
            print(f"\n{tables(results, kind)}\n\npaper's: its change against its baseline, {MACHINE}")
            print(f"\n{CANNOT}\n{busy(env)}", flush=True)
            write(arguments.json, results, env, rows)
    return 0 if all(_valid(variant, rows) for variant in variants) else 1


def rounds_of(arguments: argparse.Namespace) -> Rounds:
    """Raises ConfigError for numbers that measure nothing."""
    count = arguments.rounds or (0 if arguments.rounds == 0 else 2 if arguments.quick else 4)
    seconds = (15.0 if arguments.quick else 30.0) if arguments.seconds is None else arguments.seconds
    for flag, value, least in (("--rounds", count, 1), ("--output-tokens", arguments.output_tokens, 2)):
        if value < least:
            raise ConfigError(f"{flag} is {value}: {least} or more", param=flag)
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds is {seconds:g}: above 0", param="--seconds")
    plan = Plan(Poisson(1.0), seconds=seconds, seed=arguments.seed, warm_up_s=0.0)
    return Rounds(plan, parse_rates(arguments.rates, "--rates"), count)


def variants_of(text: str) -> list[Variant]:
    """Raises ConfigError for one that there is not."""
    by_name = {one.name: one for one in VARIANTS}
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(f"--only {unknown[0]!r}: of {', '.join(by_name)}", param="--only")
    return [by_name[name] for name in names]


def _measured(arguments: argparse.Namespace, rounds: Rounds, variants: Sequence[Variant]) -> Iterator[Row]:
    workload = Workload(WORKLOAD, 1, Knobs(arguments.seed, output_tokens=arguments.output_tokens))
    with scratch() as folder:
        model = engine_flags(arguments, folder)
        with served(LAYOUT, (*model, *BASELINE.flags), name=BASELINE.name, traced=False) as base:
            images = Images(arguments.cache)
            source = WorkloadSource(
                lambda seed: workload.seeded(seed).endless(), images.data_url, base.model, arguments.seed
            )
            for at, variant in enumerate(variants):
                with served(LAYOUT, (*model, *variant.flags), name=variant.name, traced=False) as other:
                    urls, first = (base.url, other.url), at * rounds.count * len(rounds.rates)
                    print(f"{variant.title}: ready in {other.ready_s:.0f} s", flush=True)
                    warm_up(urls, source, rounds.plan, first=first)
                    yield from in_turns(urls, variant.name, source, rounds, first=first)


def warm_up(
    urls: tuple[str, str], source: Source, plan: Plan, count: int = WARM_UP_REQUESTS, *, first: int = 0
) -> None:
    """Send so many requests to each, which count nothing: kernels, connections, first-time imports."""
    number = WARM_UP_NUMBER + first
    for url in urls:
        _sent(url, source, replace(plan, arrivals=Poisson(1.0), count=count, seconds=None, seed=number), number)


def in_turns(urls: tuple[str, str], variant: str, source: Source, rounds: Rounds, *, first: int = 0) -> Iterator[Row]:
    """Yields the requests of all rounds, as soon as both have had a rate's.

    Args:
        urls: of the baseline and of the variant.
        first: number of the first run. None may have been another variant's: the baseline has kept what it had then.

    Raises:
        StageError: one of them went away.
    """
    number = first
    for turn in range(rounds.count):
        for rate in rounds.rates:
            plan = replace(rounds.plan, arrivals=Poisson(rate), seed=rounds.plan.seed + number)
            order = random.Random(f"{variant} {number}").sample((0, 1), 2)
            sides = {side: _sent(urls[side], source, plan, number) for side in order}
            for n in sorted(sides[0].keys() & sides[1].keys()):
                about = {"variant": variant, "rate_rps": rate, "round": turn, "n": n}
                yield about | _times(sides[0][n], "baseline_") | _times(sides[1][n])
            number += 1


def _sent(url: str, source: Source, plan: Plan, number: int) -> dict[int, RequestRecord]:
    requests = source.of_run(plan, number)
    if not requests.dues:
        return {}
    with prepared(requests.bodies) as bodies:
        measured = event_loop.run(measure(Target(url), bodies, plan, label=str(number), dues=requests.dues))
    if measured.run.stopped:
        raise StageError(measured.run.stopped, stage=url)
    return {record.n: record for record in measured.run.rows}


def _times(record: RequestRecord, prefix: str = "") -> Row:
    times = {"ttft_ms": record.ttft_s, "tpot_ms": record.tpot_s}
    return {f"{prefix}{name}": round(s * 1e3, 3) if record.ok and s is not None else None for name, s in times.items()}


def _valid(variant: Variant, rows: Sequence[Row]) -> bool:
    own = [whole(row) for row in rows if row["variant"] == variant.name]
    if own and sum(own) >= LEAST_WHOLE * len(own):
        return True
    print(f"NOT VALID: {variant.title}: {sum(own)} of {len(own)} requests were answered whole by both", flush=True)
    return False
