"""`epd-bench proxy`: how much the proxy costs, over simulated stages.

Stages are simulated (`epd-serve serve --engine sim`), everything between them, the proxy and the clients is real: HTTP,
sockets, processes. What the proxy promises over minutes is tested in tests/soak.

speed: throughput is of closed loops over stages that take no time; our proxy, the relay that makes the same calls and
the stage itself in turns within a round; ratios are within a round. On PD both make one call to a stage (`relay.py`),
on P-D two (`two_calls.py`). Streams are measured twice: as they are, so that one goes on at another stage when its own
is lost, and as streams that do not (`go_on=never`). Latency is of open loops over stages that take a few milliseconds,
in the same turns, from when a request was due to its first byte; what the relay adds is what any proxy on uvicorn and
aiohttp does. Sender, proxy and stages share the machine's cores: whichever is short of them, CPU time per request is
shown too.

kills: clients' errors while stages, front doors and the controller are killed, one every ten seconds.

pressure: what happens when there is more work than time (`pressure.py`); only where it is asked for.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from bench.change.command import figures as change_figures
from bench.change.kills import kills_simulated
from bench.clients.metrics import throughput
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.micro.measurement import Goal, Measurement, Row, flag, one_of, several
from bench.micro.rows import grouped, median
from bench.proxy import pressure
from bench.proxy.rivals import (
    Rival,
    bare_relay,
    closed_loop,
    compared,
    image_request,
    ratio,
    stage_of,
    text_request,
    two_call_relay,
)
from bench.served import simulated
from bench.workloads.requests import Poisson, arrivals_within

RATE_RPS = 200.0
IMAGE_RATE_RPS = 20.0
PROFILE = {
    "prefill": {"setup_s": 0.004, "per_unit_s": 0.00002},
    "encode": {"setup_s": 0.004, "per_unit_s": 0.00001},
    "decode_step_s": [[1, 0.002], [64, 0.004]],
}
KILLS_RATE_RPS = 16.0
PROXY, ORDINARY, PROXY_P_D = "proxy", "proxy, go_on=never", "proxy P-D"
RELAY, TWO_CALLS = "relay", "two-call relay"
RPS = {
    "rps_over_bare_relay": ("whole", PROXY, RELAY),
    "streams_over_bare_relay": ("stream", ORDINARY, RELAY),
    "resumable_streams_over_bare_relay": ("stream", PROXY, RELAY),
    "pd_over_two_call_relay": ("whole", PROXY_P_D, TWO_CALLS),
    "pd_streams_over_two_call_relay": ("stream", PROXY_P_D, TWO_CALLS),
}
"""Requests a second: kind of request, who, and over whose in the same round."""
CPU = {
    "cpu_over_bare_relay": ("whole", PROXY, RELAY),
    "streams_cpu_over_bare_relay": ("stream", ORDINARY, RELAY),
    "resumable_streams_cpu_over_bare_relay": ("stream", PROXY, RELAY),
    "pd_cpu_over_two_call_relay": ("whole", PROXY_P_D, TWO_CALLS),
    "pd_streams_cpu_over_two_call_relay": ("stream", PROXY_P_D, TWO_CALLS),
}
"""The same of CPU time per request."""
ADDED = {
    "added_p50_ms": ("text", PROXY, RELAY, "first_p50_ms"),
    "added_over_stage_p50_ms": ("text", PROXY, "stage", "first_p50_ms"),
    "added_over_stage_p99_ms": ("text", PROXY, "stage", "first_p99_ms"),
    "added_whole_p50_ms": ("text", PROXY, "stage", "whole_p50_ms"),
    "added_picture_p50_ms": ("picture", PROXY, "stage", "first_p50_ms"),
    "added_picture_p99_ms": ("picture", PROXY, "stage", "first_p99_ms"),
    "relay_added_p50_ms": ("text", RELAY, "stage", "first_p50_ms"),
    "relay_added_picture_p50_ms": ("picture", RELAY, "stage", "first_p50_ms"),
}
"""Milliseconds: kind of request, whose, above whose in the same round, of what."""
LOOPED = ("whole", "stream")
"""Kinds that are closed loops; the others are open ones."""
SPEED, KILLS, PRESSURE = "speed", "kills", "pressure"
FLAGS = {
    "--only": flag(
        "parts of it (pressure: all of that name)",
        (SPEED, KILLS),
        several(one_of(SPEED, KILLS, PRESSURE, *pressure.PARTS)),
    )
}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of the parts that are asked for."""
    with SenderProcess() as sender:
        if SPEED in arguments.only:
            for part in (_throughput, _latency):
                yield from ({**row, "part": SPEED} for row in part(sender, arguments.quick))
        for name in pressure.PARTS:
            if name in arguments.only or PRESSURE in arguments.only:
                yield from pressure.measure(sender, name, arguments.quick)
    if KILLS in arguments.only:
        yield from kills_simulated(60.0 if arguments.quick else 300.0, KILLS_RATE_RPS)


def _throughput(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds, rounds = (2.0, 3) if quick else (8.0, 5)
    with (
        simulated("PD") as fused,
        simulated("PD", flags=("--proxy", "go_on=never")) as ordinary,
        simulated("P-D") as apart,
        bare_relay(stage_of(fused)) as relay,
        two_call_relay(apart) as two_calls,
    ):
        rivals = (
            Rival("stage", stage_of(fused)),
            relay,
            Rival(PROXY, fused.url, fused.cpu_parts["proxy"]),
            Rival(ORDINARY, ordinary.url, ordinary.cpu_parts["proxy"]),
            two_calls,
            Rival(PROXY_P_D, apart.url, apart.cpu_parts["proxy"]),
        )

        def loop(stream: bool, rival: Rival) -> Row:
            return closed_loop(sender, rival, [text_request(fused.model, stream=stream)], seconds)

        yield from compared(rivals, {"whole": partial(loop, False), "stream": partial(loop, True)}, rounds)


def _latency(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds, rounds = (3.0, 3) if quick else (10.0, 5)
    with simulated("PD", PROFILE) as launch, bare_relay(stage_of(launch)) as relay:
        rivals = Rival("stage", stage_of(launch)), relay, Rival(PROXY, launch.url)
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
    named = speed_figures(parts[SPEED]) if SPEED in parts else {}
    if killed := change_figures(rows):
        named["client_errors_under_kills"] = killed["kills_client_errors"] + killed["kills_cut_streams"]
        named["kills"] = killed["kills"]
    return named | pressure.figures(parts)


def speed_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Over the relays, and above them and the stage."""
    by = grouped(rows, "kind", "to", "round")

    def added(kind: str, name: str, base: str, field: str) -> float:
        """Milliseconds above the base's, the median over rounds."""
        rounds = [turn for of, to, turn in by if (of, to) == (kind, name)]
        over = [median(by[kind, name, turn], field) - median(by[kind, base, turn], field) for turn in rounds]
        return round(statistics.median(over), 4)

    return {
        **{figure: ratio(rows, *of, "rps") for figure, of in RPS.items()},
        **{figure: ratio(rows, *of, "cpu_us_per_request") for figure, of in CPU.items()},
        "generator_us_per_request": median((row for row in rows if row["kind"] in LOOPED), "generator_us_per_request"),
        **{figure: added(*of) for figure, of in ADDED.items()},
    }


MEASUREMENT = Measurement(
    quick="shorter runs, fewer rounds and kills",
    flags=FLAGS,
    about=lambda arguments: {"kind": "real proxy, clients and sockets; simulated stages"},
    measure=measure,
    figures=figures,
    goals=(
        Goal("rps_over_bare_relay", ">=", 0.75, "never the bottleneck: one call each, answers in one piece"),
        Goal("streams_over_bare_relay", ">=", 0.88, "the same, streams"),
        Goal("resumable_streams_over_bare_relay", ">=", 0.88, "the same, streams that can go on elsewhere"),
        Goal("pd_over_two_call_relay", ">=", 0.6, "two calls each, answers in one piece"),
        Goal("pd_streams_over_two_call_relay", ">=", 0.75, "the same, streams"),
        Goal("pd_cpu_over_two_call_relay", "<=", 1.25, "the proxy's part of it, answers in one piece"),
        Goal("added_p50_ms", "<=", 0.4, f"over the relay, {RATE_RPS:g} streamed text requests a second"),
        Goal("added_over_stage_p50_ms", "<=", 1.0, "the same, over the stage itself"),
        Goal("added_over_stage_p99_ms", "<=", 5.0),
        Goal("added_picture_p50_ms", "<=", 2.6, "an image of 200 KB in the request, over the stage"),
        Goal("client_errors_under_kills", "==", 0, "but for connections of a killed front door"),
        *pressure.GOALS,
    ),
)
add_arguments = MEASUREMENT.add_arguments
