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
from bench.papers.table2 import BASELINE, LAYOUT, VARIANTS, Row, Variant, figures, tables
from bench.real_stages import add_engine_flags, check_memory, engine_flags, kind_of
from bench.record import add_arguments as add_record_arguments
from bench.record import busy, environment, kept, write
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


@dataclass(frozen=True)
class Rounds:
    """How much is sent. `plan`: of one run, but for its rate and seed. `count`: of each rate."""

    plan: Plan
    rates: Sequence[float]
    count: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, names = parser.add_argument, [one.name for one in VARIANTS]
    add("--rates", default="0.5,1", help="requests a second, with commas (default 0.5,1)")
    add("--rounds", type=int, help="of each rate, in turns (default 4, quick 2)")
    add("--seconds", type=float, help="of a run (default 30, quick 15)")
    add("--only", default=",".join(names), help="variants, with commas")
    add("--output-tokens", type=int, default=32, help="of an answer (default 32)")
    add("--seed", type=int, default=0, help="of requests and arrivals")
    add("--cache", type=Path, metavar="DIR", help="where drawn images are kept")
    add_engine_flags(parser)
    add_record_arguments(parser, quick="2 rounds of 15 s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, write; the rows until an error are kept. 1 where answers are missing."""
    require(["scipy"])
    rounds, variants = rounds_of(arguments), variants_of(arguments.only)
    if arguments.engine == "vllm":
        check_memory(STAGES)
    env = {**environment(argv, asked=arguments), **kind_of(arguments), "layout": LAYOUT}
    env |= {"flags": {one.name: list(one.flags) for one in (BASELINE, *variants)}}
    rows: list[Row] = []
    with kept(arguments.json, env, rows):
        for row in _measured(arguments, rounds, variants):
            rows.append(row)  # noqa: PERF402  (one by one: an error keeps those before it)
    results = figures(rows)
    print("\n" + "\n\n".join([env["kind"], *tables(rows), busy(env)]), flush=True)
    write(arguments.json, results, env, rows)
    return 0 if all(results.get(f"{one.name}/whole", 0.0) >= LEAST_WHOLE for one in variants) else 1


def rounds_of(arguments: argparse.Namespace) -> Rounds:
    """Raises ConfigError for numbers that measure nothing."""
    count, seconds = (2, 15.0) if arguments.quick else (4, 30.0)
    count = count if arguments.rounds is None else arguments.rounds
    seconds = seconds if arguments.seconds is None else arguments.seconds
    least = {"--rounds": (count, 1), "--output-tokens": (arguments.output_tokens, 2), "--seconds": (seconds, 1e-3)}
    for flag, (value, bound) in least.items():
        if not bound <= value < float("inf"):
            raise ConfigError(f"{flag} is {value:g}: {bound:g} or more", param=flag)
    plan = Plan(Poisson(1.0), seconds=seconds, seed=arguments.seed, warm_up_s=0.0)
    return Rounds(plan, parse_rates(arguments.rates, "--rates"), count)


def variants_of(text: str) -> list[Variant]:
    """Raises ConfigError for one that there is not."""
    names, known = text.split(","), [one.name for one in VARIANTS]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]!r}: of {', '.join(known)}", param="--only")
    return [one for one in VARIANTS if one.name in names]


def _measured(arguments: argparse.Namespace, rounds: Rounds, variants: Sequence[Variant]) -> Iterator[Row]:
    """The requests of every variant beside the baseline, as soon as both have had a rate's."""
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
    bodies = prepared(requests.bodies)
    measured = event_loop.run(measure(Target(url), bodies, plan, label=str(number), dues=requests.dues))
    if measured.run.stopped:
        raise StageError(measured.run.stopped, stage=url)
    return {record.n: record for record in measured.run.rows}


def _times(record: RequestRecord, prefix: str = "") -> Row:
    times = {"ttft_ms": record.ttft_s, "tpot_ms": record.tpot_s}
    return {f"{prefix}{name}": round(s * 1e3, 3) if record.ok and s is not None else None for name, s in times.items()}
