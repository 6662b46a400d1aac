"""`epd-bench ablations`: what single parts of the transfers between stages are worth; EPD-Serve's Table 2.

The base is up together with one variant at a time, and both get the same requests in turns, so that a ratio is of two
that met the same machine. Each round has new requests, since those of the round before would be served from the stores;
both have them at the same times, one after the other, in an order that is drawn for each round.

The rows of Table 2 (layerwise, prefetch, grouped, both) add to the paper's baseline: a feature is fetched when a
request needs it, and KV is sent as a whole when its prompt is computed (§3.3, "synchronous transmission"), so all of
its transfer is exposed; of the paper's own baseline 85 % is (Table 4). `layerwise` is a row that the paper lacks: KV
layer by layer at once, which hides most of it already. demand, pixels, all-images and mooncake each take a part of the
way from E to P away from all of it. At a low rate requests hardly ever meet each other.

On two cores this shows what each switch costs or saves per request, and no net gain from overlap: a transfer that hides
behind a layer takes that layer's core. The paper's gains come from copy engines and links beside the computing units.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.page import require
from bench.analysis.ratios import Ratio, Sample, sample_ratio
from bench.clients.bodies import Source, workload_source
from bench.clients.measure import Plan
from bench.clients.measure import measure as sent_by_plan
from bench.clients.results import RequestRecord
from bench.clients.target import Target
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, one_of, positive, several, whole
from bench.micro.rows import grouped
from bench.served import check_memory, scratch, served
from bench.workloads.generate import Knobs
from bench.workloads.images import Images
from bench.workloads.requests import Poisson
from bench.workloads.workload import Workload
from deploy.host import event_loop
from deploy.options.mooncake import what_is_missing
from epd_serve.demo.presets import write_preset
from epd_serve.errors import ConfigError, StageError
from epd_serve.layout_parser import parse


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        name: as in figures, and in the paper's table.
        prefetch, grouping: `--feature-prefetch` and `--kv-grouping` of `epd-serve serve`. more: other flags of it.
        of_all: its base is not the paper's baseline, but all of the mechanism.
    """

    name: str
    prefetch: str = "event"
    grouping: str = "adaptive"
    more: tuple[str, ...] = ()
    of_all: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Also where they are the default, so that results name them."""
        return ("--feature-prefetch", self.prefetch, "--kv-grouping", self.grouping, *self.more)


BASELINE, WHOLE = Variant("baseline", "demand", "bulk"), Variant("whole")
TABLE = (
    Variant("layerwise", "demand", "layerwise"),
    Variant("prefetch", "event", "bulk"),
    Variant("grouped", "demand", "adaptive"),
    Variant("both", "event", "adaptive"),
)
APART = (
    Variant("demand", "demand", of_all=True),
    Variant("pixels", more=("--send-pixels", "always"), of_all=True),
    Variant("all-images", more=("--partial-prefill", "off"), of_all=True),
    Variant("mooncake", more=("--mm-store", "mooncake"), of_all=True),
)
VARIANTS = {one.name: one for one in (*TABLE, *APART)}

WORKLOAD = "sharegpt4o-like"
PRESET = "bench"
"""Random weights, an 8B model's proportions."""
WARM_UP_REQUESTS, WARM_UP_RPS = 8, 4.0
GOALS = tuple(Goal(f"{name}/whole", ">=", 0.9, "of the requests, or it is no result") for name in VARIANTS)
FLAGS = {
    "--layout": flag("of both sides", "E-P-D"),
    "--only": flag(
        f"of {','.join(VARIANTS)}", tuple(one.name for one in TABLE), several(one_of(*VARIANTS)), metavar="NAME,…"
    ),
    "--rates": flag("requests a second", (0.5, 1.0), several(positive), metavar="R,…"),
    "--rounds": flag("of each rate, in turns", Usually(4, quick=2), whole()),
    "--seconds": flag("of a run", Usually(30.0, quick=15.0), positive),
    "--output-tokens": flag("of an answer", 32, whole(2)),
    "--pictures-each": flag("images of each request that has any (default: as the workload has)", None, whole()),
    "--seed": flag("of requests and arrivals", 0, int),
    "--cache": flag("where drawn images are kept", type=Path, metavar="DIR"),
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="sim: to try the flow, no measurement"
    )
    parser.add_argument("--sim-profile", help="with --engine sim: the profile of the simulated stages")


def engine_flags(arguments: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """What every launch gets: the model, or the simulation."""
    if arguments.engine == "sim":
        return ("--engine", "sim", *(("--sim-profile", arguments.sim_profile) if arguments.sim_profile else ()))
    write_preset(folder / PRESET, PRESET)
    return (str(folder / PRESET),)


def kind_of(arguments: argparse.Namespace) -> dict[str, str]:
    """What `env` says of the run."""
    return {
        "kind": f"real: CPU, {PRESET} preset" if arguments.engine == "vllm" else "simulated stages: to try the flow"
    }


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    flags = {one.name: list(one.flags) for one in (BASELINE, WHOLE, *(VARIANTS[name] for name in arguments.only))}
    return {**kind_of(arguments), "layout": arguments.layout, "flags": flags}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """The requests of every variant beside its base, as soon as both have had a rate's."""
    require(["scipy"])
    if "mooncake" in arguments.only and (missing := what_is_missing("cpu", master=True)):
        raise ConfigError(f"--only mooncake: {missing}, or leave mooncake out", param="--only")
    layout, chosen = arguments.layout, [VARIANTS[name] for name in arguments.only]
    if arguments.engine == "vllm":
        check_memory(2 * parse(layout).instance_count)
    knobs = Knobs(arguments.seed, images=arguments.pictures_each, output_tokens=arguments.output_tokens)
    workload = Workload(WORKLOAD, 1, knobs)
    images, numbers = Images(arguments.cache), itertools.count()
    plan = Plan(Poisson(1.0), seconds=arguments.seconds, seed=arguments.seed, warm_up_s=0.0)
    with scratch() as folder:
        model = engine_flags(arguments, folder)
        for of_all, variants in itertools.groupby(sorted(chosen, key=lambda one: one.of_all), lambda one: one.of_all):
            base = WHOLE if of_all else BASELINE
            with served(layout, (*model, *base.flags), name=base.name, traced=False) as first:
                source = workload_source(workload.endless_of, images.data_url, first.model, arguments.seed)
                for variant in variants:
                    with served(layout, (*model, *variant.flags), name=variant.name, traced=False) as other:
                        print(f"{variant.name}: ready in {other.ready_s:.0f} s", flush=True)
                        urls = (first.url, other.url)
                        warm_up(urls, source, plan, numbers)
                        for turn, rate in itertools.product(range(arguments.rounds), arguments.rates):
                            case = {"variant": variant.name, "rate_rps": rate, "round": turn}
                            yield from ({**case, **row} for row in both(urls, source, plan, rate, next(numbers)))


def warm_up(
    urls: Sequence[str], source: Source, plan: Plan, numbers: Iterator[int], count: int = WARM_UP_REQUESTS
) -> None:
    """Send so many requests to each, which count nothing: kernels, connections, first-time imports."""
    number = next(numbers)
    for url in urls:
        arrivals = Poisson(WARM_UP_RPS)
        _sent(url, source, replace(plan, arrivals=arrivals, count=count, seconds=None, seed=plan.seed + number), number)


def both(urls: Sequence[str], source: Source, plan: Plan, rate_rps: float, number: int) -> Iterator[Row]:
    """Yields the requests of run `number`, as the base and the variant, whose URLs are given, answered them.

    Raises:
        StageError: one of them went away.
    """
    plan = replace(plan, arrivals=Poisson(rate_rps), seed=plan.seed + number)
    order = random.Random(number).sample((0, 1), 2)
    sides = {side: _sent(urls[side], source, plan, number) for side in order}
    for n in sorted(sides[0].keys() & sides[1].keys()):
        yield {"n": n, **_times(sides[0][n], "baseline_"), **_times(sides[1][n])}


def _sent(url: str, source: Source, plan: Plan, number: int) -> dict[int, RequestRecord]:
    requests = source(plan, number)
    if not requests.dues:
        return {}
    measured = event_loop.run(sent_by_plan(Target(url), requests.requests, plan, label=str(number), dues=requests.dues))
    if measured.run.stopped:
        raise StageError(measured.run.stopped, stage=url)
    return {record.n: record for record in measured.run.rows}


def _times(record: RequestRecord, prefix: str = "") -> Row:
    times = {"ttft_ms": record.ttft_s, "tpot_ms": record.tpot_s}
    return {f"{prefix}{name}": round(s * 1e3, 3) if record.ok and s is not None else None for name, s in times.items()}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Returns `RATE rps/VARIANT/ttft_ms`, `baseline_ttft_ms`, `ttft_over_baseline` with `_low`, `_high`; TPOT likewise.

    Means over the requests that both answered whole; intervals (95 %) over pairs in blocks of neighbours. And
    `VARIANT/whole`: the share of its requests that were.

    Args:
        rows: one of each request, sent to the base and to a variant in the same round: `variant`, `rate_rps`, `round`,
            `n`, and `ttft_ms`, `tpot_ms`, `baseline_ttft_ms`, `baseline_tpot_ms`, each None without a whole answer.
    """
    results: dict[str, float] = {}
    for (rate, variant), own in grouped(rows, "rate_rps", "variant").items():
        prefix = f"{rate:g} rps/{variant}"
        results[f"{prefix}/requests"] = len(own)
        results[f"{prefix}/not_whole"] = sum(not _whole(row) for row in own)
        for kind, found in _changes(own).items():
            results |= {f"{prefix}/baseline_{kind}_ms": round(found.a, 3), f"{prefix}/{kind}_ms": round(found.b, 3)}
            ends = {"": found.ratio, "_low": found.low, "_high": found.high}
            over = {f"{prefix}/{kind}_over_baseline{end}": value for end, value in ends.items()}
            results |= {name: round(value, 4) for name, value in over.items() if value is not None}
    for (variant,), own in grouped(rows, "variant").items():
        results[f"{variant}/whole"] = sum(map(_whole, own)) / len(own)
    return results


def _whole(row: Row) -> bool:
    """Both have answered it."""
    return None not in (row["ttft_ms"], row["baseline_ttft_ms"])


def _changes(rows: Sequence[Row]) -> dict[str, Ratio]:
    """Of TTFT and TPOT, the variant over the baseline."""
    found = {}
    for kind in ("ttft", "tpot"):
        pairs = [(row[f"baseline_{kind}_ms"], row[f"{kind}_ms"]) for row in rows]
        values = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
        if values[:, 0].any():  # simulated answers may come all at once
            found[kind] = sample_ratio(f"{kind}_ms", Sample(values[:, 0]), Sample(values[:, 1]), paired=True)
    return found


MEASUREMENT = Measurement(
    quick="2 rounds of 15 s",
    flags=FLAGS,
    add_flags=add_engine_flags,
    about=about,
    measure=measure,
    figures=figures,
    required=GOALS,
)
add_arguments = MEASUREMENT.add_arguments
