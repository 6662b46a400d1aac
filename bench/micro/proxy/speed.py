"""How fast the proxy is: requests a second against a bare relay, and what it adds to a request's latency.

Throughput: closed loops over stages that take no time, our proxy, the bare relay (`relay.py`) and the stage itself in
turns within a round; ratios are within a round. The base makes one call to a stage, and so does our proxy on the layout
PD; on P-D it makes two, which is shown beside it against the same base. Latency: open loops over stages that take a few
milliseconds, our proxy, the bare relay and the stage itself in turns, from when a request was due to its first byte;
what the relay adds is what any proxy on this server and client does.

Sender, proxy and stages share the machine's cores: whichever is short of them, CPU time per request is shown too.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

from bench.clients.metrics import throughput
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.example_proxies import Rival
from bench.goals import Goal
from bench.micro.proxy.part import Options, Part, PartResult
from bench.micro.proxy.rivals import (
    Row,
    bare_relay,
    by_round,
    closed_loop,
    image_request,
    in_turns,
    medians_table,
    ratio,
    text_request,
)
from bench.micro.proxy.simulated import simulated
from bench.workloads.arrivals import Poisson, arrivals_within

RATE_RPS = 200.0
IMAGE_RATE_RPS = 20.0
PROFILE = {
    "prefill": {"setup_s": 0.004, "per_unit_s": 0.00002},
    "encode": {"setup_s": 0.004, "per_unit_s": 0.00001},
    "decode_step_s": [[1, 0.002], [64, 0.004]],
}


def measure(options: Options) -> PartResult:
    with SenderProcess() as sender:
        loops = _throughput(sender, options.quick)
        latencies = _latency(sender, options.quick)

    def added(kind: str, field: str, name: str = "proxy") -> float:
        """Milliseconds above the stage's, the median over rounds."""
        return round(statistics.median(one[name] - one["stage"] for one in by_round(latencies, kind, field)), 4)

    figures = {
        "rps_over_bare_relay": ratio(loops, "whole", "proxy", "relay"),
        "rps_over_bare_relay_streamed": ratio(loops, "stream", "proxy", "relay"),
        "rps_over_bare_relay_p_d": ratio(loops, "whole", "proxy P-D", "relay"),
        "rps_over_bare_relay_p_d_streamed": ratio(loops, "stream", "proxy P-D", "relay"),
        "cpu_over_bare_relay": ratio(loops, "whole", "proxy", "relay", "cpu_us_per_request"),
        "generator_us_per_request": statistics.median(row["generator_us_per_request"] for row in loops),
        "added_p50_ms": added("text", "first_p50_ms"),
        "added_p99_ms": added("text", "first_p99_ms"),
        "added_whole_p50_ms": added("text", "whole_p50_ms"),
        "added_whole_p99_ms": added("text", "whole_p99_ms"),
        "added_picture_p50_ms": added("picture", "first_p50_ms"),
        "added_picture_p99_ms": added("picture", "first_p99_ms"),
        "relay_added_p50_ms": added("text", "first_p50_ms", "relay"),
        "relay_added_p99_ms": added("text", "first_p99_ms", "relay"),
        "relay_added_picture_p50_ms": added("picture", "first_p50_ms", "relay"),
    }
    tables = [
        medians_table(loops, {"rps": ".0f", "cpu_us_per_request": ".0f", "generator_us_per_request": ".0f"}),
        medians_table(latencies, {f"{what}_p{p}_ms": ".2f" for what in ("first", "whole") for p in (50, 99)}),
    ]
    return PartResult(figures, [*loops, *latencies], "\n\n".join(tables))


PART = Part(
    "speed",
    "requests a second against a bare relay, latency added to text and images",
    measure,
    (
        Goal("rps_over_bare_relay", ">=", 0.6, "never the bottleneck: one call each, answers in one piece"),
        Goal("added_p50_ms", "<=", 1.0, f"{RATE_RPS:g} streamed text requests a second"),
        Goal("added_p99_ms", "<=", 5.0),
        Goal("added_picture_p50_ms", "<=", 3.0, "an image of 200 KB in the request"),
    ),
)


def _throughput(sender: SenderProcess, quick: bool) -> list[Row]:
    seconds, rounds = (2.0, 3) if quick else (8.0, 5)
    with simulated("PD") as fused, simulated("P-D") as apart:
        stage = fused.stage_url("PD")
        assert stage is not None, "the layout has a PD"
        with bare_relay(stage) as relay:
            rivals = (
                Rival("stage", stage),
                relay,
                Rival("proxy", fused.url, fused.cpu_parts["proxy"]),
                Rival("proxy P-D", apart.url, apart.cpu_parts["proxy"]),
            )

            def loop(stream: bool, rival: Rival) -> Row:
                return closed_loop(sender, rival, [text_request(fused.model, stream=stream)], seconds)

            kinds = {"whole": functools.partial(loop, False), "stream": functools.partial(loop, True)}
            return list(in_turns(rivals, kinds, rounds))


def _latency(sender: SenderProcess, quick: bool) -> list[Row]:
    seconds, rounds = (3.0, 3) if quick else (10.0, 5)
    with simulated("PD", PROFILE) as launch:
        stage = launch.stage_url("PD")
        assert stage is not None, "the layout has a PD"
        with bare_relay(stage) as relay:
            rivals = Rival("stage", stage), relay, Rival("proxy", launch.url)
            texts = [text_request(launch.model, stream=True)]
            images = [image_request(launch.model, seed) for seed in range(4)]

            def open_loop(requests: Sequence[Request], rate_rps: float, seconds: float) -> Callable[[Rival], Row]:
                dues = arrivals_within(Poisson(rate_rps), seconds, seed=round(rate_rps))
                return lambda rival: throughput(sender.run(rival.url, Flow(requests, dues=dues)))

            for requests in (texts, images):  # connections, first-time imports
                list(in_turns(rivals, {"": open_loop(requests, IMAGE_RATE_RPS, 1.0)}, 1))
            kinds = {
                "text": open_loop(texts, RATE_RPS, seconds),
                "picture": open_loop(images, IMAGE_RATE_RPS, seconds),
            }
            return list(in_turns(rivals, kinds, rounds))
