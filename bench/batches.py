"""`epd-bench batches`: throughput and latency of each stage alone against its batch size.

As HydraInfer v1 Fig. 6 (v2 Fig. 3). E-PD is served and its stages are asked past the proxy, one stage at a time, with
so many requests under way:

    encode     pictures of --side pixels, each new to the encoder     pictures/s, and ms per picture
    prefill    prompts of --prompt tokens, one token of answer        prompt tokens/s, and ms per prompt
    decode     short prompts, --answer tokens each                    output tokens/s, and ms between tokens

The batch is what the scheduler makes of the requests under way: it may split them into several steps. Decode's
throughput is the sum of the answers' own rates, after their first tokens. A stage is saturated at the least batch size
that has 90 % of its best throughput, unless that is the largest one measured.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.batches_figures import BatchPoint, draw, figures, lines
from bench.colocation import PRESET, check_memory, engine_flags
from bench.colocation_mix import EVERY_TOKEN, numbered_picture
from bench.flow_process import FlowGenerator
from bench.flows import GOOD, Flow, Outcome
from bench.record import add_arguments as add_record_arguments
from bench.record import busy, environment, write
from bench.scenario_bodies import text
from bench.served import Served, served
from bench.storm import encoder_bodies
from bench.timeline import check_plot
from deploy.placement_table import table
from epd_serve.errors import ConfigError, StageError

LAYOUT = "E-PD"
STAGES = {"encode": "E", "prefill": "PD", "decode": "PD"}
SIZES, QUICK_SIZES = "1,2,4,8,16", "1,2,4"
TURNS, QUICK_TURNS = 4, 2
"""Requests of a point over its batch size; at least `LEAST`."""
LEAST = 4
MOST = 512
SHORT_PROMPT = 32
LIMIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", metavar="N,…", help=f"requests under way (default {SIZES}, quick {QUICK_SIZES})")
    parser.add_argument("--stages", default=",".join(STAGES), help="of encode, prefill, decode (default all)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt of prefill (default 1024)")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer of decode (default 32)")
    parser.add_argument("--side", type=int, default=336, help="of a picture, in pixels (default 336)")
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="sim: to try the flow, no measurement"
    )
    parser.add_argument("--sim-profile", help="with --engine sim: the profile of the simulated stages")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves (needs matplotlib)")
    add_record_arguments(parser, quick=f"sizes {QUICK_SIZES}, fewer requests of each")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, draw, write. What was measured is written also where a later point fails."""
    stages, sizes = stages_of(arguments), sizes_of(arguments)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    real = arguments.engine == "vllm"
    if real:
        check_memory(2)
    kind = f"real: {LAYOUT} on CPU, {PRESET} preset" if real else "simulated stages: to try the flow"
    env = environment(argv, kind)
    found: list[BatchPoint] = []
    turns = QUICK_TURNS if arguments.quick else TURNS
    try:
        with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch, FlowGenerator() as generator:
            with served(LAYOUT, engine_flags(arguments, Path(scratch)), traced=False) as launch:
                print(f"{LAYOUT}: ready in {launch.ready_s:.0f} s", flush=True)
                for stage in stages:
                    bodies = _bodies(stage, launch.model, arguments)
                    measure(generator, launch, stage, bodies, 1, LEAST, arguments)  # imports, kernels, connections
                    for size in sizes:
                        count = size if stage == "decode" else max(LEAST, turns * size)
                        point = measure(generator, launch, stage, bodies, size, count, arguments)
                        print(f"  {point}", flush=True)
                        found.append(point)
    finally:
        write(arguments.json, figures(found), env, [point.row() for point in found])
    print(f"\n{kind}\n\n{table(lines(found))}\n{busy(env)}")
    if arguments.plot is not None:
        draw(arguments.plot, found, kind)
    return 0


def stages_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Raises ConfigError for a stage that there is not, and for numbers that measure nothing."""
    words = tuple(dict.fromkeys(arguments.stages.split(",")))
    for word in words:
        if word not in STAGES:
            raise ConfigError(f"--stages: {word!r} is none of {', '.join(STAGES)}", param="--stages")
    for flag, least in (("prompt", 1), ("answer", 2), ("side", 28)):
        if getattr(arguments, flag) < least:
            raise ConfigError(f"--{flag} {getattr(arguments, flag)}: at least {least}", param=f"--{flag}")
    return words


def sizes_of(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Ascending. Raises ConfigError for what is no list of them."""
    given = arguments.sizes or (QUICK_SIZES if arguments.quick else SIZES)
    words = given.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= MOST for word in words):
        raise ConfigError(f"--sizes {given}: numbers between 1 and {MOST}, separated by commas", param="--sizes")
    return tuple(sorted(set(map(int, words))))


def measure(
    generator: FlowGenerator,
    launch: Served,
    stage: str,
    bodies: Iterator[dict[str, Any]],
    size: int,
    count: int,
    asked: argparse.Namespace,
) -> BatchPoint:
    """`count` requests to the stage, `size` under way.

    Raises:
        StageError: an answer was not good.
    """
    url = launch.stage_url(STAGES[stage])
    assert url is not None, f"{LAYOUT} has a {STAGES[stage]}"
    flow = Flow(stage, list(itertools.islice(bodies, count)), at_once=size, count=count)
    outcomes = generator.run(url, [flow], within_s=LIMIT_S, limit_s=LIMIT_S).outcomes
    return point_of(stage, size, outcomes, prompt=asked.prompt, answer=asked.answer)


def point_of(stage: str, size: int, outcomes: Sequence[Outcome], *, prompt: int, answer: int) -> BatchPoint:
    """Pure.

    Raises:
        StageError: an answer was not good, since fewer requests are another batch size; or too short to be timed.
    """
    bad = [one for one in outcomes if one.verdict != GOOD]
    if bad or not outcomes:
        said = f"{bad[0].verdict}: {bad[0].said}" if bad else "nothing was sent"
        raise StageError(f"{stage}, {size} at once: {len(bad)} of {len(outcomes)} answers failed: {said}", stage=stage)
    count = len(outcomes)
    if stage == "decode":
        each_s = [(one.ended - one.first) / (answer - 1) for one in outcomes]
        if min(each_s) <= 0:
            raise StageError("decode: all tokens of an answer came at once: ask for a longer --answer", stage=stage)
        return BatchPoint(stage, size, count, sum(1 / seconds for seconds in each_s), sum(each_s) / count * 1e3)
    seconds = max(one.ended for one in outcomes) - min(one.due for one in outcomes)
    each = prompt if stage == "prefill" else 1
    return BatchPoint(stage, size, count, each * count / seconds, sum(one.whole_s for one in outcomes) / count * 1e3)


def _bodies(stage: str, model: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Requests without end, none of which has anything that a cache could know."""
    if stage == "encode":
        return encoder_bodies(model, numbered_picture(0, asked.side))
    if stage == "prefill":
        return (text(model, tokens=asked.prompt, answer=1, stream=False, seed=n) for n in itertools.count())
    return (
        text(model, tokens=SHORT_PROMPT, answer=asked.answer, stream=True, seed=-1 - n) | EVERY_TOKEN
        for n in itertools.count()
    )
