"""`epd-bench ablations`: EPD-Serve's Table 2, E-P-D with and without asynchronous prefetching and grouped KV.

The baseline is up together with one variant at a time, and both get the same requests in turns, so that a ratio is of
two that met the same machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.ablations.rounds import Rounds, in_turns, warm_up
from bench.ablations.table2 import BASELINE, LAYOUT, PAPER_MACHINE, UNGROUPED, VARIANTS, Asked, Variant, figures, shown
from bench.client.measure import Plan
from bench.client.source import WorkloadSource
from bench.micro.real_stages import check_memory, engine_flags
from bench.record import add_arguments as add_record_arguments
from bench.record import busy, environment, write
from bench.served import served
from bench.workloads.arrivals import Poisson
from bench.workloads.generate import Knobs
from bench.workloads.pictures import Pictures
from bench.workloads.workload import Workload
from epd_serve.errors import ConfigError

WORKLOAD = "sharegpt4o-like"
STAGES = 6
"""Up at a time: two layouts of three."""
LEAST_WHOLE = 0.9
"""Share of requests that both have to answer whole for the table to be a result."""

CANNOT = """\
What this can show here: what each switch costs or saves per request, on an engine that is hardly loaded. What it
cannot: a net gain from overlap. Two CPU cores do the computing and the copying; a transfer that hides behind a layer
takes that layer's core. The paper's gains come from copy engines and links that work beside the computing units."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", default="0.5,1", help="requests a second, with commas (default 0.5,1)")
    parser.add_argument("--rounds", type=int, help="of each rate, in turns (default 4, quick 2)")
    parser.add_argument("--seconds", type=float, help="of a run (default 30, quick 15)")
    parser.add_argument("--only", default=",".join(one.name for one in VARIANTS), help="variants, with commas")
    parser.add_argument("--ungrouped", choices=UNGROUPED, default=UNGROUPED[0], help="KV of the baseline")
    parser.add_argument("--output-tokens", type=int, default=32, help="of an answer (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and arrivals")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where drawn pictures are kept")
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="sim: to try the flow, no measurement"
    )
    parser.add_argument("--sim-profile", help="with --engine sim: the profile of the simulated stages")
    add_record_arguments(parser, quick="2 rounds of 15 s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, write; what was measured is kept however it ends. 1 where answers are missing."""
    rounds, variants = rounds_of(arguments), variants_of(arguments.only)
    wanted = Workload(WORKLOAD, 1, Knobs(arguments.seed, output_tokens=arguments.output_tokens))
    if arguments.engine == "vllm":
        check_memory(STAGES)
    kind = "real stages" if arguments.engine == "vllm" else "simulated stages: to try the flow"
    env = environment(argv, kind, asked=arguments)
    env["layout"] = LAYOUT
    env["flags"] = {one.name: list(one.flags(arguments.ungrouped)) for one in (BASELINE, *variants)}
    asked: list[Asked] = []
    try:
        _measure(arguments, rounds, variants, wanted, asked)
    finally:
        found = figures(asked, arguments.seed)
        if asked:
            print(f"\n{shown(found, kind)}\n\npaper's: its change against its baseline, {PAPER_MACHINE}")
            print(f"\n{CANNOT}\n{busy(env)}", flush=True)
            write(arguments.json, found, env, [one.row() for one in asked])
    return _exit_code(asked, variants)


def rounds_of(arguments: argparse.Namespace) -> Rounds:
    """Raises ConfigError for numbers that measure nothing."""
    quick = arguments.quick
    count = (2 if quick else 4) if arguments.rounds is None else arguments.rounds
    seconds = (15.0 if quick else 30.0) if arguments.seconds is None else arguments.seconds
    for flag, value, least in (("--rounds", count, 1), ("--output-tokens", arguments.output_tokens, 2)):
        if value < least:
            raise ConfigError(f"{flag} is {value}: {least} or more", param=flag)
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds is {seconds:g}: above 0", param="--seconds")
    try:
        rates = [float(word) for word in arguments.rates.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rates {arguments.rates}: numbers above 0, with commas", param="--rates")
    return Rounds(Plan(Poisson(1.0), seconds=seconds, seed=arguments.seed, warm_up_s=0.0), rates, count)


def variants_of(text: str) -> list[Variant]:
    """Raises ConfigError for one that there is not."""
    names = {one.name: one for one in VARIANTS}
    if unknown := [word for word in text.split(",") if word not in names]:
        raise ConfigError(f"--only {unknown[0]!r}: of {', '.join(names)}", param="--only")
    return [names[word] for word in dict.fromkeys(text.split(","))]


def _measure(
    arguments: argparse.Namespace, rounds: Rounds, variants: Sequence[Variant], wanted: Workload, asked: list[Asked]
) -> None:
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
        model = engine_flags(arguments, Path(scratch))
        flags = (*model, *BASELINE.flags(arguments.ungrouped))
        with served(LAYOUT, flags, name=BASELINE.name, traced=False) as base:
            source = WorkloadSource(
                lambda seed: wanted.seeded(seed).endless(),
                Pictures(arguments.cache).data_url,
                base.model,
                arguments.seed,
            )
            for at, variant in enumerate(variants):
                flags = (*model, *variant.flags(arguments.ungrouped))
                with served(LAYOUT, flags, name=variant.name, traced=False) as other:
                    urls = base.url, other.url
                    print(f"{variant.title}: ready in {other.ready_s:.0f} s", flush=True)
                    first = at * rounds.count * len(rounds.rates)
                    warm_up(urls, source, rounds.plan, first=first)
                    asked.extend(in_turns(urls, variant.name, source, rounds, first=first))


def _exit_code(asked: Sequence[Asked], variants: Sequence[Variant]) -> int:
    for variant in variants:
        own = [one for one in asked if one.variant == variant.name]
        whole = sum(None not in one.ttft_ms for one in own)
        if not own or whole < LEAST_WHOLE * len(own):
            print(f"NOT VALID: {variant.title}: {whole} of {len(own)} requests were answered whole by both", flush=True)
            return 1
    return 0
