"""`epd-bench ttft`: time to first token of a picture, layouts or variants of one layout against each other.

All layouts are up at once and take turns (`bench/turns.py`); an idle vLLM uses no CPU, and the share it does use is
in the record. A monolith is asked twice per turn, through the proxy and past it, so that the proxy's part shows. Two
cores cannot show a gain from overlap; this shows what the split costs.

`--mechanism` asks one layout with and without each part of the E→P mechanism (`bench/mechanism.py`) instead.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench import mechanism
from bench.chat import ask, body
from bench.processes import cpu_seconds, since
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, flatten, write
from bench.served import Served, served
from bench.stamps import Timeline, read_stamps
from bench.turns import MODES, Pictures, ask_all, row_of, summarise, targets_of, text
from epd_serve.demo.presets import PRESETS, write_preset
from epd_serve.errors import ConfigError

IDLE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", default="TP1,(E-P)-D", help="comma-separated; ratios are to the first")
    parser.add_argument("--mechanism", action="store_true", help="(E-P)-D with and without each part of the mechanism")
    parser.add_argument(
        "--without", default=",".join(mechanism.VARIANTS), help="with --mechanism: the parts to take away, each alone"
    )
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="the model")
    parser.add_argument("--requests", type=int, help="measured requests per target and mode (default 30, quick 8)")
    parser.add_argument("--warmup", type=int, default=5, help="requests per target before measuring")
    parser.add_argument("--modes", help="unique and/or repeated pictures (default both, quick unique)")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between requests")
    parser.add_argument("--size", type=int, default=224, help="picture width and height in pixels")
    add_record_arguments(parser, quick="8 requests per target, new pictures only")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the tables, write the result."""
    if unknown := set(arguments.without.split(",")) - set(mechanism.VARIANTS):
        raise ConfigError(f"--without {', '.join(sorted(unknown))}: one of {', '.join(mechanism.VARIANTS)}")
    if arguments.requests is None:
        arguments.requests = 8 if arguments.quick else 30
    if arguments.modes is None:
        arguments.modes = MODES[0] if arguments.quick else ",".join(MODES)
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
        model: tuple[str, ...] = ()
        if arguments.preset != "demo":
            write_preset(Path(scratch) / arguments.preset, arguments.preset)
            model = (f"{scratch}/{arguments.preset}",)
        return mechanism.run(arguments, argv, model) if arguments.mechanism else _layouts(arguments, argv, model)


def _layouts(arguments: argparse.Namespace, argv: Sequence[str], model: tuple[str, ...]) -> int:
    env = environment(argv, asked=arguments)
    modes = arguments.modes.split(",")
    with contextlib.ExitStack() as stack:
        launches = [stack.enter_context(served(layout, model)) for layout in arguments.layouts.split(",")]
        targets = [target for launch in launches for target in targets_of(launch)]
        client = stack.enter_context(httpx.Client(timeout=120, trust_env=False))
        pictures = Pictures(arguments.size)
        for target in targets:
            for _ in range(arguments.warmup):
                ask(client, target.url, body(target.launch.model, pictures.new()))
        idle = _idle_share(launches)
        turns = {"requests": arguments.requests, "pause_s": arguments.pause, "trained": arguments.preset == "demo"}
        asked = [one for mode in modes for one in ask_all(client, targets, mode, pictures, **turns)]
        timelines = {launch.name: Timeline(read_stamps(launch.traces)) for launch in launches}
    rows = [row_of(one, {target.name: target for target in targets}, timelines) for one in asked]
    summary = {mode: summarise([row for row in rows if row["mode"] == mode], targets) for mode in modes}
    for mode, figures in summary.items():
        print(f"\n{mode} pictures, {arguments.requests} requests per target (real)\n\n{text(figures)}")
    print("\nidle CPU, share of one core: " + ", ".join(f"{name} {share:.3f}" for name, share in idle.items()))
    write(arguments.json, flatten({"idle_cpu_share": idle, **summary}), env, rows)
    return 0


def _idle_share(launches: Sequence[Served]) -> dict[str, float]:
    """CPU that each launch uses while nothing is asked of it, as a share of one core."""
    before = [cpu_seconds(launch.cpu_parts) for launch in launches]
    time.sleep(IDLE_S)
    after = [cpu_seconds(launch.cpu_parts) for launch in launches]
    return {
        f"{launch.name} {part}": round(spent / IDLE_S, 4)
        for launch, pair in zip(launches, zip(before, after, strict=True), strict=True)
        for part, spent in since(*pair).items()
    }
