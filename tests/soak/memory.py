"""`python -m tests.soak.memory`: whether the proxy's memory grows with the requests it has served.

A tenth of them are given up by their clients midway. Text and images, whole answers and streams, over simulated stages.
After a warm-up the proxy's memory is read between batches of requests, at rest; the figure is the slope over all
readings. In the end nothing may be left in flight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from scipy.stats import theilslopes

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from bench.micro.measurement import Goal
from bench.served import simulated
from bench.workloads.synthetic import image_body, text_body
from deploy.memory.placement_table import table
from tests.soak.front_door import held, until
from tests.soak.harness import Result, Soak
from tests.soak.resident import resident

LAYOUT = "E-P-D"
PROFILE = {
    "encode": {"setup_s": 0.002},
    "prefill": {"setup_s": 0.002},
    "decode_step_s": [[1, 0.002], [64, 0.004]],
    "feature_bytes_per_token": 64,
}
ARENA_MIB = 16  # the launcher holds it, so it counts
CONCURRENCY = 32
LEAVE_SHARE = 0.15  # means to; about a third of them has its answer before
FIRST_GUESS_S = 0.1
BODIES = 64
BATCHES = 10
PER = 100_000
REST_S = 1.0
BATCH_LIMIT_S = 600.0
EMPTY_S = 20.0


def measure(arguments: argparse.Namespace) -> Result:
    warm_up, counted = (2_000, 5_000) if arguments.quick else (10_000, 50_000)
    rows: list[dict[str, Any]] = []
    bad: list[RequestRecord] = []
    with simulated(LAYOUT, PROFILE, ("--arena-mib", str(ARENA_MIB))) as launch, SenderProcess() as sender:
        pids = launch.cpu_parts["proxy"]
        served, lasts_s = 0, FIRST_GUESS_S
        for batch in range(BATCHES + 1):
            count = counted // BATCHES if batch else warm_up
            flow = _flow(launch.model, count, lasts_s, batch)
            records = sender.run(launch.url, flow, within_s=BATCH_LIMIT_S).rows
            bad += [one for one in records if not one.ok and not one.left]
            lasts_s = statistics.median(one.e2e_s for one in records if one.ok)
            until(lambda: not held(launch.url), EMPTY_S)
            time.sleep(REST_S)
            served += len(records) if batch else 0
            memory, left = resident(pids), sum(one.left for one in records)
            rows.append({"served": served, "left": left, "rss_mb": memory.rss_mb, "uss_mb": memory.uss_mb})
        still_held = held(launch.url)
    growth = {  # Theil and Sen: the median slope over all pairs, which a single step up or down does not bend
        name: theilslopes([row[f"{name}_mb"] for row in rows], [row["served"] for row in rows]).slope * PER
        for name in ("rss", "uss")
    }
    figures = {
        **{f"{name}_growth_mb_per_100k": round(float(slope), 3) for name, slope in growth.items()},
        "memory_requests": float(served),
        "memory_left_share": round(sum(row["left"] for row in rows[1:]) / max(served, 1), 4),
        "memory_errors": float(len(bad)),
        "held_after_all_ended": float(sum(still_held.values())),
    }
    lines = [("requests after the warm-up", "left in this batch", "RSS MiB", "USS MiB")]
    lines += [(str(row["served"]), str(row["left"]), f"{row['rss_mb']:.1f}", f"{row['uss_mb']:.1f}") for row in rows]
    errors = sorted({f"{one.fault}: {one.error}" for one in bad})[:5]
    return figures, [*rows, {"errors": errors, "held": still_held}], "\n".join([table(lines), *errors])


SOAK = Soak(
    "memory",
    "growth of the proxy's memory, a tenth of the clients leaving",
    measure,
    (
        Goal("held_after_all_ended", "==", 0.0, "no load leaks, whatever the ending"),
        Goal("memory_errors", "==", 0.0),
    ),
)


def _flow(model: str, count: int, lasts_s: float, batch: int) -> Flow:
    """`lasts_s`: how long a request takes; clients that leave do so at every moment of it."""
    bodies = []
    for turn in range(BODIES):
        stream = turn % 2 == 0
        bodies.append(text_body(model, tokens=64, answer=16, stream=stream, seed=turn))
        bodies.append(text_body(model, tokens=16, answer=8, stream=not stream, seed=turn))
        bodies.append(image_body(model, side=112, answer=8, stream=stream, seed=turn))
    leaving = {"leave_share": LEAVE_SHARE, "leave_within_s": lasts_s, "seed": batch}
    return Flow(requests(bodies), "mixed", concurrency=CONCURRENCY, count=count, **leaving)


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
