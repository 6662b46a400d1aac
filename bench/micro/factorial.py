"""`epd-bench factorial`: what each part of a stage costs a monolith, against plain vLLM on the same cores.

Parts: the worker inside EngineCore's process, or in one of its own, where both wait for each other asleep on a bell, or
in vLLM's own spinning; the reporting scheduler, the queue by priority, the number of OpenMP threads, and the proxy. A
stage with each combination is started from the very
command that `epd-serve serve` uses, less the parts that it is to be without; the monolith as shipped is served, and
asked through the proxy and past it. Plain vLLM is started with its own defaults and bound to one core and to all.

Every server is a session of its own, as a launcher starts it: where Linux groups processes by session
(`sched_autogroup_enabled`), one that shares the load generator's would have another share of a busy machine. Few fit
into memory at once, so they come in groups, each with plain vLLM bound to one core as its base. Within a group all are
up and take turns, in an order drawn for every round, each after a rest: plain vLLM's worker looks for its next step for
a second after the last, on a core. A turn is requests with an image of its own each, so many at once, or in open loop
at a share of the base's capacity. Ratios are to the base in the same round; where enough rounds met cores of one speed
throughout (`bench/micro/cores.py`), only those count.

`spaced` tells of each start how evenly its tokens came: the share of gaps between tokens that are longer than a tenth
of the mean. On two cores vLLM's busy loop can keep its own front end from running; whole answers then arrive at once,
`spaced` is near 0, and TTFT and TPOT mean nothing. Such starts are listed apart, and count in no ratio but end to end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.clients.results import RequestRecord
from bench.clients.sender import Bounds, Flow, Run, send
from bench.clients.target import Request
from bench.micro.cores import core_us, ratios_at_one_speed
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, several, whole
from bench.micro.rows import grouped, median, table_of
from bench.served import scratch, served
from bench.sweep.experiment import Deployment
from bench.sweep.running import REST_S, command
from bench.workloads.requests import ClosedLoop, Poisson, arrival_times
from bench.workloads.synthetic import DemoImage, demo_body, demo_image
from deploy.agent.health import health_status
from deploy.agent.specs import orders
from deploy.agent.wiring import Site, wire
from deploy.host.environment import stage_environment
from deploy.host.ports import free_ports
from deploy.host.rundir import RunDir
from deploy.host.started import started
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import Blueprint, draw
from epd_serve.cpu_threads import BIND_ENV, CPU_THREADS_ENV, CpuThreads
from epd_serve.demo.presets import PRESETS, write_preset
from epd_serve.engine.argv import SHARED_CORES_ENV, stage_command
from epd_serve.errors import StageError

START_S = 300.0
LIMIT_S = 60.0
WARM_UP = 8
TOGETHER = 3  # stages of a group, besides the base
PICTURE_SIDE = 224
BASE, DEFAULTS = "vLLM, 1 thread", "vLLM, its defaults"
SPACED = 0.5  # below it a start is starved
MEASURES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms_per_token": "e2e"}


FLAGS = {
    "--preset": flag("the model", "demo", choices=PRESETS),
    "--rounds": flag("of each group", Usually(7, quick=5), whole()),
    "--requests": flag("a round, of each at every load", Usually(16, quick=6), whole()),
    "--at-once": flag("closed loops of so many", (1, 8), several(whole())),
    "--capacity": flag("open loops at these shares of the base's", Usually((0.4, 0.8), quick=()), several(float)),
    "--only": flag("TP1 and plain vLLM alone, or stages without their parts alone", choices=("shipped", "parts")),
    "--starts": flag("of every group", Usually(2, quick=1), whole()),
}
COMBINED = {"action": "store_true", "help": "all 24 combinations, not only one part taken away at a time"}
FLAG_OF = {"inside": "--distributed-executor-backend", "reports": "--scheduler-cls", "priority": "--scheduling-policy"}


@dataclass(frozen=True)
class Variant:
    """A stage with some of its parts. `bell` matters to a worker that is not `inside`. `threads` 0: as shipped."""

    inside: bool = True
    bell: bool = True
    reports: bool = True
    priority: bool = True
    threads: int = 0

    def __str__(self) -> str:
        off = [name for name, on in vars(self).items() if on is False]
        return " ".join(["stage", *(f"-{name}" for name in off), *([f"{self.threads}t"] if self.threads else [])])


@dataclass(frozen=True)
class Target:
    name: str
    url: str
    model: str


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """The whole stage, each part taken away alone, and all of them; or all combinations."""
    both, waits = (True, False), ((True, True), (False, True), (False, False))
    if arguments.whole:
        combined = itertools.product(waits, both, both, (1, 2))
        return [Variant(*wait, reports, priority, threads) for wait, reports, priority, threads in combined]
    full = Variant()
    outside = [replace(full, inside=False), replace(full, inside=False, bell=False)]
    alone = [replace(full, reports=False), replace(full, priority=False), replace(full, threads=2)]
    return [full, *outside, *alone]


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per target, load and round."""
    pictures = (demo_image(seed, PICTURE_SIDE) for seed in itertools.count(1))
    stages = variants(arguments)
    groups = [stages[first : first + TOGETHER] for first in range(0, len(stages), TOGETHER)]
    groups = [[], *groups][{"parts": slice(1, None), "shipped": slice(1)}.get(arguments.only, slice(None))]
    for start, (number, group) in itertools.product(range(arguments.starts), enumerate(groups)):
        with scratch() as folder, contextlib.ExitStack() as stack:
            model = "" if arguments.preset == "demo" else str(folder / arguments.preset)
            if model:
                write_preset(folder / arguments.preset, arguments.preset)
            blueprint = draw(DeployConfig(model=model, layout="TP1", device="cpu"))
            start_plain = functools.partial(_plain, stack, blueprint, folder)
            cores = blueprint.cores_of(blueprint.plans[0])
            targets = [start_plain(BASE, cores[:1]), *(_stage(stack, blueprint, folder, each) for each in group)]
            if not group:  # what a user would run
                targets += [start_plain(DEFAULTS, ()), start_plain(f"vLLM, {len(cores)} threads", cores)]
                targets += _served(stack, model)
            for row in _turns(targets, pictures, arguments):
                yield {**row, "group": f"{start}/{number}", "round": f"{start}/{number}/{row['round']}"}


def _turns(targets: Sequence[Target], pictures: Iterator[DemoImage], arguments: argparse.Namespace) -> Iterator[Row]:
    chance, capacity_rps = random.Random(0), 0.0
    loads = [f"{count} at once" for count in arguments.at_once] + [f"{share:g}" for share in arguments.capacity]
    for target in targets:
        _ask(target, pictures, WARM_UP, ClosedLoop(WARM_UP))
    for number, load in itertools.product(range(arguments.rounds), loads):
        for target in chance.sample(targets, len(targets)):
            time.sleep(REST_S)
            arrivals = ClosedLoop(int(load.split()[0])) if "at once" in load else Poisson(float(load) * capacity_rps)
            before = core_us()
            run = _ask(target, pictures, max(arguments.requests, WARM_UP), arrivals, seed=number)
            cores, rate_rps = [*before, *core_us()], len(run.rows) / (run.ended_s - run.begun_s)
            if target.name == BASE and isinstance(arrivals, ClosedLoop):
                capacity_rps = max(capacity_rps, rate_rps)
            row = {"target": target.name, "load": load, "round": number, "rate_rps": rate_rps, **times(run.rows)}
            print({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})
            yield {**row, "core_us": cores}


def _ask(
    target: Target, pictures: Iterator[DemoImage], count: int, arrivals: ClosedLoop | Poisson, seed: int = 0
) -> Run:
    """Raises StageError where a request has no whole answer."""
    counted = {"stream_options": {"include_usage": True}}  # several tokens may come in one event
    requests = [Request.of({**demo_body(target.model, next(pictures)), **counted}) for _ in range(count)]
    if isinstance(arrivals, ClosedLoop):
        flow = Flow(requests, concurrency=arrivals.concurrency, count=count)
    else:
        flow = Flow(requests, dues=list(itertools.islice(arrival_times(arrivals, seed), count)))
    run = send(target.url, flow, bounds=Bounds(LIMIT_S))
    if failed := [record for record in run.rows if not record.ok]:
        raise StageError(f"{target.name}: {failed[0].fault}: {failed[0].error}", stage=target.name)
    return run


def _served(stack: contextlib.ExitStack, model: str) -> list[Target]:
    """The monolith as shipped, through its proxy and past it."""
    launch = stack.enter_context(served("TP1", [model] if model else [], traced=False))
    direct = launch.stage_url("EPD")
    assert direct is not None, "TP1 is a monolith"
    return [Target("TP1", launch.url, launch.model), Target("TP1 past the proxy", direct, launch.model)]


def times(records: Sequence[RequestRecord]) -> Row:
    """Medians of one round. `e2e_ms_per_token` is of all its answers together: what no starving can hide."""
    gaps = [gap for record in records for gap in record.itl_s]
    even = statistics.fmean(gaps) / 10
    return {
        "ttft_ms": statistics.median(record.ttft_s or 0.0 for record in records) * 1e3,
        "tpot_ms": statistics.median(record.tpot_s or 0.0 for record in records) * 1e3,
        "e2e_ms_per_token": sum(one.e2e_s for one in records) / sum(one.output_tokens for one in records) * 1e3,
        "spaced": sum(gap > even for gap in gaps) / len(gaps),
    }


def _stage(stack: contextlib.ExitStack, blueprint: Blueprint, folder: Path, variant: Variant) -> Target:
    """One stage, without a launcher or a proxy, from the command that they would use, less what `variant` lacks."""
    (plan,) = blueprint.plans
    run = RunDir.create(folder / "run")
    stack.callback(run.remove)
    (order,) = orders(blueprint)
    stage = wire(order, Site(run, staging_bytes=0), 0, os.urandom(6).hex())
    made = stage_command(stage)
    argv, env = list(made.argv), dict(made.env)
    if not variant.bell:
        del env[SHARED_CORES_ENV]
    for name in (name for part, name in FLAG_OF.items() if not getattr(variant, part)):
        at = argv.index(name)
        del argv[at : at + 2]
    if variant.threads:
        env[CPU_THREADS_ENV] = CpuThreads(blueprint.cores_of(plan), variant.threads).to_json()
    environment = stage_environment(env, run.path, blueprint.device)
    return _started(stack, str(variant), argv, environment, stage.url, blueprint.served_model_name, folder)


def _plain(stack: contextlib.ExitStack, blueprint: Blueprint, folder: Path, name: str, cores: Sequence[int]) -> Target:
    """vLLM with nothing of ours, its threads on `cores`; without any it chooses itself."""
    (port,) = free_ports(1)
    argv, env = command(Deployment(name, "TP1", 1), blueprint, blueprint.plans[0], port)
    env |= {"TMPDIR": str(folder), BIND_ENV: ",".join(map(str, cores)) or "auto"}
    return _started(stack, name, argv, env, f"http://127.0.0.1:{port}", blueprint.served_model_name, folder)


def _started(
    stack: contextlib.ExitStack,
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    url: str,
    model: str,
    folder: Path,
) -> Target:
    log = folder / f"{name.replace(' ', '_')}.log"
    server = stack.enter_context(started(argv, log, env=env, by=signal.SIGTERM))
    server.ready(lambda: asyncio.run(health_status(url, START_S)) == 200, START_S)
    return Target(name, url, model)


def starved(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """Starts, by target and group, of which most tokens came several at once, at one request at a time."""
    alone = grouped((row for row in rows if row["load"] == "1 at once"), "target", "group")
    return {key for key, own in alone.items() if median(own, "spaced") < SPACED}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`TARGET/LOAD/ttft_over_vllm` and so on: medians of the ratios by round to the base of the same group."""
    found: dict[str, float] = {}
    bad = starved(rows)
    for (name, load), own in grouped(rows, "target", "load").items():
        if name == BASE:
            continue
        groups = {row["group"] for row in own}
        base = [row for row in rows if row["target"] == BASE and row["load"] == load and row["group"] in groups]
        even = [row for row in own if not bad & {(name, row["group"]), (BASE, row["group"])}]
        for measure_, label in MEASURES.items():
            spread = ratios_at_one_speed(own if measure_ == "e2e_ms_per_token" else even, base, measure_)
            if spread is not None:
                found[f"{name}/{load}/{label}_over_vllm"] = round(spread.median, 4)
    for measure_, figure in (("ttft", "tp1_ttft_over_vllm"), ("e2e", "tp1_tpot_over_vllm")):
        told = [found[key] for key in found if key.startswith("TP1/") and f"at once/{measure_}_" in key]
        if told:
            found[figure] = max(told)
    return {**found, "starved_starts": len(bad), "starts": len({(row["target"], row["group"]) for row in rows})}


def tables(rows: Sequence[Row]) -> Iterable[str]:
    over, bad = figures(rows), starved(rows)
    lines = [
        {
            "name": name,
            "load": load,
            **{measure_: median(own, measure_) for measure_ in (*MEASURES, "spaced")},
            **{
                f"{label}_over": f"{ratio:.2f}" if (ratio := over.get(f"{name}/{load}/{label}_over_vllm")) else ""
                for label in MEASURES.values()
            },
            "starved": sum(target == name for target, _ in bad) or "",
        }
        for (name, load), own in sorted(grouped(rows, "target", "load").items(), key=lambda item: item[0][1])
    ]
    columns = {"": "{name}", "load": "{load}", "TTFT ms": "{ttft_ms:.1f}", "over": "{ttft_over}"}
    columns |= {"TPOT ms": "{tpot_ms:.2f}", "over ": "{tpot_over}", "end to end ms a token": "{e2e_ms_per_token:.2f}"}
    yield table_of(lines, {**columns, "over  ": "{e2e_over}", "spaced": "{spaced:.2f}", "starved starts": "{starved}"})


MEASUREMENT = Measurement(
    quick="one start of each with one part taken away, closed loops alone",
    flags={**FLAGS, "--whole": COMBINED},
    about=lambda arguments: {"kind": f"real stages, {arguments.preset} model, {PICTURE_SIDE}² images"},
    measure=measure,
    figures=figures,
    tables=tables,
    goals=(Goal("tp1_ttft_over_vllm", "<=", 1.15), Goal("tp1_tpot_over_vllm", "<=", 1.05)),
)
add_arguments = MEASUREMENT.add_arguments
