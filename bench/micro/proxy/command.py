"""`epd-bench proxy`: how much the proxy costs, over simulated stages.

Stages are simulated (`epd-serve serve --engine sim`), everything between them, the proxy and the clients is real: HTTP,
sockets, processes. What the proxy promises over minutes is tested in tests/soak.

speed: throughput is of closed loops over stages that take no time, our proxy, the bare relay (`relay.py`) and the stage
itself in turns within a round; ratios are within a round. The base makes one call to a stage, and so does our proxy on
the layout PD; on P-D it makes two, which is shown beside it against the same base. Latency is of open loops over stages
that take a few milliseconds, in the same turns, from when a request was due to its first byte; what the relay adds is
what any proxy on uvicorn and aiohttp does. Sender, proxy and stages share the machine's cores: whichever is short of
them, CPU time per request is shown too.

pressure: what happens when there is more work than time (`pressure.py`); only where it is asked for.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from bench.clients.metrics import throughput
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.micro.measurement import Goal, Measurement, Row, flag
from bench.micro.proxy import pressure
from bench.micro.proxy.rivals import (
    Rival,
    bare_relay,
    closed_loop,
    compared,
    image_request,
    ratio,
    stage_of,
    text_request,
)
from bench.micro.rows import grouped, median
from bench.served import simulated
from bench.workloads.requests import Poisson, arrivals_within

RATE_RPS = 200.0
IMAGE_RATE_RPS = 20.0
PROFILE = {
    "prefill": {"setup_s": 0.004, "per_unit_s": 0.00002},
    "encode": {"setup_s": 0.004, "per_unit_s": 0.00001},
    "decode_step_s": [[1, 0.002], [64, 0.004]],
}
RATIOS = {
    "rps_over_bare_relay": ("whole", "proxy", "rps"),
    "rps_over_bare_relay_streamed": ("stream", "proxy", "rps"),
    "rps_over_bare_relay_p_d": ("whole", "proxy P-D", "rps"),
    "rps_over_bare_relay_p_d_streamed": ("stream", "proxy P-D", "rps"),
    "cpu_over_bare_relay": ("whole", "proxy", "cpu_us_per_request"),
}
"""Kind of request, who, and of what; over the bare relay's in the same round."""
ADDED = {
    "added_p50_ms": ("text", "proxy", "first_p50_ms"),
    "added_p99_ms": ("text", "proxy", "first_p99_ms"),
    "added_whole_p50_ms": ("text", "proxy", "whole_p50_ms"),
    "added_whole_p99_ms": ("text", "proxy", "whole_p99_ms"),
    "added_picture_p50_ms": ("picture", "proxy", "first_p50_ms"),
    "added_picture_p99_ms": ("picture", "proxy", "first_p99_ms"),
    "relay_added_p50_ms": ("text", "relay", "first_p50_ms"),
    "relay_added_p99_ms": ("text", "relay", "first_p99_ms"),
    "relay_added_picture_p50_ms": ("picture", "relay", "first_p50_ms"),
}
"""The same, above the stage's own."""
LOOPED = ("whole", "stream")
"""Kinds that are closed loops; the others are open ones."""
FLAGS = {
    "--only": flag(
        "one part (pressure: all of that name)",
        "speed",
        choices=("speed", "pressure", *pressure.PARTS),
    )
}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of the part that is asked for."""
    with SenderProcess() as sender:
        if arguments.only == "speed":
            for part in (_throughput, _latency):
                yield from ({**row, "part": "speed"} for row in part(sender, arguments.quick))
        else:
            for name in pressure.PARTS if arguments.only == "pressure" else (arguments.only,):
                yield from pressure.measure(sender, name, arguments.quick)


def _throughput(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds, rounds = (2.0, 3) if quick else (8.0, 5)
    with simulated("PD") as fused, simulated("P-D") as apart, bare_relay(stage_of(fused)) as relay:
        rivals = (
            Rival("stage", stage_of(fused)),
            relay,
            Rival("proxy", fused.url, fused.cpu_parts["proxy"]),
            Rival("proxy P-D", apart.url, apart.cpu_parts["proxy"]),
        )

        def loop(stream: bool, rival: Rival) -> Row:
            return closed_loop(sender, rival, [text_request(fused.model, stream=stream)], seconds)

        yield from compared(rivals, {"whole": partial(loop, False), "stream": partial(loop, True)}, rounds)


def _latency(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds, rounds = (3.0, 3) if quick else (10.0, 5)
    with simulated("PD", PROFILE) as launch, bare_relay(stage_of(launch)) as relay:
        rivals = Rival("stage", stage_of(launch)), relay, Rival("proxy", launch.url)
        texts = [text_request(launch.model, stream=True)]
        images = [image_request(launch.model, seed) for seed in range(4)]

        def open_loop(requests: Sequence[Request], rate_rps: float, seconds: float, rival: Rival) -> Row:
            dues = arrivals_within(Poisson(rate_rps), seconds, seed=round(rate_rps))
            return throughput(sender.run(rival.url, Flow(requests, dues=dues)))

        for requests, rival in itertools.product((texts, images), rivals):  # connections, first-time imports
            open_loop(requests, IMAGE_RATE_RPS, 1.0, rival)
        kinds = {
            "text": partial(open_loop, texts, RATE_RPS, seconds),
            "picture": partial(open_loop, images, IMAGE_RATE_RPS, seconds),
        }
        yield from compared(rivals, kinds, rounds)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Those of the parts that there are."""
    parts = {part: own for (part,), own in grouped(rows, "part").items()}
    return (speed_figures(parts["speed"]) if "speed" in parts else {}) | pressure.figures(parts)


def speed_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Over the bare relay, and above the stage."""
    by = grouped(rows, "kind", "to", "round")

    def added(kind: str, name: str, field: str) -> float:
        """Milliseconds above the stage's, the median over rounds."""
        rounds = [turn for of, to, turn in by if (of, to) == (kind, name)]
        over = [median(by[kind, name, turn], field) - median(by[kind, "stage", turn], field) for turn in rounds]
        return round(statistics.median(over), 4)

    over_stage = {figure: added(*of) for figure, of in ADDED.items()}
    return {
        **{figure: ratio(rows, kind, name, "relay", field) for figure, (kind, name, field) in RATIOS.items()},
        "generator_us_per_request": median((row for row in rows if row["kind"] in LOOPED), "generator_us_per_request"),
        **over_stage,
        "added_p50_over_relay_ms": round(over_stage["added_p50_ms"] - over_stage["relay_added_p50_ms"], 4),
    }


MEASUREMENT = Measurement(
    quick="shorter runs, fewer rounds",
    flags=FLAGS,
    about=lambda arguments: {"kind": "real proxy, clients and sockets; simulated stages"},
    measure=measure,
    figures=figures,
    goals=(
        Goal("rps_over_bare_relay", ">=", 0.75, "never the bottleneck: one call each, answers in one piece"),
        Goal("rps_over_bare_relay_streamed", ">=", 0.85, "the same, streams"),
        Goal("added_p50_over_relay_ms", "<=", 0.4, f"{RATE_RPS:g} streamed text requests a second"),
        Goal("added_p50_ms", "<=", 1.0, "the same, over the stage itself"),
        Goal("added_p99_ms", "<=", 5.0),
        Goal("added_picture_p50_ms", "<=", 3.0, "an image of 200 KB in the request"),
        *pressure.GOALS,
    ),
)
add_arguments = MEASUREMENT.add_arguments
