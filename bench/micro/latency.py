"""`epd-bench latency`: how long things take that nobody loads: starts, restarts, a monolith's tokens, every phase.

In parts (`--only`), each on the demo model and from outside, as a user's process meets the product:

    ready    (E-P)-D from its start to its ready message, second start on
    phases   where the time of one request at a time goes: a new image, the same again, text
    waiting  the share of a core that the processes of an idle stage take
    restart  from a stage's kill -9 until the proxy has it back, each stage in turn: idle, and under load
    tp1, epd ours over plain vLLM on the same cores (`bench/micro/over_vllm.py`)
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from bench.clients.phases import HOPS, joined, request_phases
from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow, ask
from bench.clients.target import requests
from bench.micro import over_vllm
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, one_of, several, whole
from bench.micro.over_vllm import ANSWER_TOKENS, LAYOUT, NEW, REPEATED, SIDE, TEXT
from bench.micro.rows import grouped, median
from bench.served import Served, served
from bench.sweep.running import proxy_status
from bench.workloads.synthetic import demo_body, demo_image, image_body, text_body
from deploy.agent.cpu_time import cpu_seconds, groups, since
from epd_serve.errors import StageError
from epd_serve.phases.stamps import Timeline, read_stamps

PARTS = ("ready", "phases", "waiting", "restart", *over_vllm.PARTS)
IDLE_S, SETTLE_S, STAMPS_S, LOOK_S = 10.0, 3.0, 1.0, 0.05
RESTART_S = 300.0
"""After which a killed stage counts as lost."""
LOADED_AT_ONCE = 4
GOALS = (
    Goal("ready_s", "<=", 20),
    Goal("restart_s", "<=", 6),
    Goal("restart_loaded_s", "<=", 12),
    Goal("waiting_core_share", "<=", 0.02),
    Goal("phases_sum_error", "<=", 0.02),
    Goal("hops_exposed_ms", "<=", 12),
    Goal("tp1_ttft_over_vllm", "<=", 1.15),
    Goal("tp1_tpot_over_vllm", "<=", 1.05),
    Goal("epd_ttft_new_over_vllm", "<=", 1.8),
    Goal("epd_ttft_repeat_over_vllm", "<=", 1.5),
    Goal("epd_ttft_text_over_vllm", "<=", 1.5),
    Goal("epd_token_over_vllm", "<=", 1.10),
)


FLAGS = {
    "--only": flag("parts of it", PARTS, several(one_of(*PARTS))),
    "--rounds": flag("of each part", Usually(5, quick=1), whole()),
    "--requests": flag("of each kind in a round", Usually(10, quick=3), whole()),
    "--turns": flag("of each server or state in a round, where these take turns", Usually(8, quick=2), whole()),
    "--engine": flag("sim: to try the flow", "vllm", choices=("vllm", "sim")),
}


def about(arguments: argparse.Namespace) -> dict[str, str]:
    real = arguments.engine == "vllm"
    return {"kind": "real: CPU, demo model" if real else "simulated stages: to try the flow, no measurement"}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of the parts that were asked for, each with its `part`."""
    engine = ("--engine", arguments.engine)
    if "ready" in arguments.only:
        yield from _ready(arguments.rounds, arguments.engine)
    of_a_launch = {"phases": _phases, "waiting": _waiting, "restart": _restart}
    if of_a_launch.keys() & set(arguments.only):
        with served(LAYOUT, engine) as launch:
            for name, part in of_a_launch.items():
                if name in arguments.only:
                    yield from part(launch, arguments)
    for name in over_vllm.PARTS:
        if name in arguments.only:
            yield from over_vllm.measure(arguments, name)


def _ready(rounds: int, engine: str) -> Iterator[Row]:
    """A start before them fills the caches."""
    for turn in range(-1, rounds):
        with served(LAYOUT, ("--engine", engine), traced=False) as launch:
            row = {"part": "ready", "round": turn, "load": os.getloadavg()[0], "seconds": launch.ready_s}
        if turn >= 0:
            yield row


def _phases(launch: Served, arguments: argparse.Namespace) -> Iterator[Row]:
    """One request at a time, of each kind in turn."""
    asked: list[tuple[str, RequestRecord]] = []
    for seed in range(900, 903):  # connections, kernels, first-time imports
        ask(launch.url, demo_body(launch.model, demo_image(seed, SIDE)))
    for turn in range(arguments.rounds * arguments.requests):
        image = demo_body(launch.model, demo_image(1000 + turn, SIDE))
        text = text_body(launch.model, tokens=32, answer=ANSWER_TOKENS, stream=True, seed=turn)
        for kind, body in ((NEW, image), (REPEATED, image), (TEXT, text)):
            asked.append((kind, ask(launch.url, body)))
    time.sleep(STAMPS_S)  # the last ones are written after the answer
    timeline = Timeline(read_stamps(launch.traces))
    for kind, record in asked:
        found = joined(record, timeline)
        if found is None:
            raise StageError(f"the stamps know nothing of request {record.id}", stage=LAYOUT)
        yield {"part": "phases", "kind": kind, **found}


def _waiting(launch: Served, arguments: argparse.Namespace) -> Iterator[Row]:
    time.sleep(SETTLE_S)
    for turn in range(arguments.rounds):
        before = cpu_seconds(launch.cpu_parts)
        time.sleep(IDLE_S)
        spent = since(before, cpu_seconds(launch.cpu_parts))
        for stage in launch.stages:
            own = sum(seconds for part, seconds in spent.items() if part.startswith(f"{stage.instance}/"))
            yield {"part": "waiting", "what": stage.instance, "round": turn, "share": round(own / IDLE_S, 5)}


def _restart(launch: Served, arguments: argparse.Namespace) -> Iterator[Row]:
    bodies = [image_body(launch.model, side=SIDE, answer=ANSWER_TOKENS, stream=True, seed=seed) for seed in range(64)]
    for turn, loaded in itertools.product(range(arguments.rounds), (False, True)):
        stages = launch.stages if not arguments.quick else launch.stages[:1]
        for stage in stages:
            with _load(launch, bodies) if loaded else nullcontext():
                seconds = _back_after_kill(launch, stage.instance)
            ask(launch.url, demo_body(launch.model, demo_image(2000 + turn, SIDE)))  # it does serve
            yield {"part": "restart", "what": stage.instance, "round": turn, "loaded": loaded, "seconds": seconds}


@contextmanager
def _load(launch: Served, bodies: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Images, some at once, for as long as the context lasts; those that a kill ends are not looked at."""
    with SenderProcess() as sender:
        sender.start(launch.url, Flow(requests(bodies), concurrency=LOADED_AT_ONCE, duration_s=RESTART_S))
        time.sleep(SETTLE_S)
        yield


def _back_after_kill(launch: Served, instance: str) -> float:
    """Seconds until the proxy gives a new life of the instance work. Raises StageError where it takes too long."""
    before = {one.instance: one.incarnation for one in proxy_status(launch.url)}[instance]
    os.killpg(groups(launch.run.parent)[instance], signal.SIGKILL)
    begun = time.monotonic()
    while time.monotonic() < begun + RESTART_S:
        now = next(one for one in proxy_status(launch.url) if one.instance == instance)
        if now.incarnation != before and not now.down:
            return round(time.monotonic() - begun, 3)
        time.sleep(LOOK_S)
    raise StageError(f"{instance} is not back {RESTART_S:.0f} s after it was killed", stage=instance)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Those of the parts that there are. Medians over rounds; of kinds, stages and loads the worst counts."""
    parts = {part: own for (part,), own in grouped(rows, "part").items()}
    found: dict[str, float] = {}
    if "ready" in parts:
        found["ready_s"] = median(parts["ready"], "seconds")
    for (loaded,), own in grouped(parts.get("restart", ()), "loaded").items():
        found["restart_loaded_s" if loaded else "restart_s"] = _worst(own, "what", "seconds")
    if "waiting" in parts:
        found["waiting_core_share"] = _worst(parts["waiting"], "what", "share")
    if "phases" in parts:
        shares = [{**row, "error": abs(row["sum_error"])} for row in parts["phases"]]
        found["phases_sum_error"] = _worst(shares, "kind", "error")
        new = [request_phases(row).exposed for row in parts["phases"] if row["kind"] == NEW]
        found["hops_exposed_ms"] = float(np.median([sum(each.get(phase, 0.0) for phase in HOPS) for each in new]))
    found |= over_vllm.figures(parts)
    return {name: round(value, 5) for name, value in found.items()}


def _worst(rows: Iterable[Row], kind: str, name: str) -> float:
    return max(median(own, name) for own in grouped(rows, kind).values())


MEASUREMENT = Measurement(
    quick="one round, three requests of each kind, one killed stage",
    flags=FLAGS,
    about=about,
    measure=measure,
    figures=figures,
    goals=GOALS,
)
add_arguments = MEASUREMENT.add_arguments
