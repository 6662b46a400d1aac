"""Whether the proxy's memory grows with the requests it has served, a tenth of them given up by their clients midway.

Text and pictures, whole answers and streams, over simulated stages. After a warm-up the proxy's memory is read between
batches of requests, at rest; the figure is the slope over all readings. In the end nothing may be left in flight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.flow_process import FlowGenerator
from bench.flows import GOOD, LEFT, Flow, Outcome
from bench.front_door import held, until
from bench.goals import Goal
from bench.proxy_part import Found, Options, Part
from bench.proxy_speed import simulated
from bench.resident import Resident, growth, resident
from bench.scenario_bodies import picture, text
from deploy.placement_table import table

LAYOUT = "E-P-D"
PROFILE = {
    "encode": {"setup_s": 0.002},
    "prefill": {"setup_s": 0.002},
    "decode_step_s": [[1, 0.002], [64, 0.004]],
    "feature_bytes_per_token": 64,
}
ARENA_MIB = 16  # the launcher holds it, so it counts
AT_ONCE = 32
LEAVE_SHARE = 0.15  # means to; about a third of them has its answer before
FIRST_GUESS_S = 0.1
PICTURES = 64
BATCHES = 10
PER = 100_000
REST_S = 1.0
BATCH_LIMIT_S = 600.0
EMPTY_S = 20.0

Row = dict[str, Any]


def measure(options: Options) -> Found:
    warm_up, counted = (2_000, 5_000) if options.quick else (10_000, 50_000)
    rows: list[Row] = []
    bad: list[Outcome] = []
    with simulated(LAYOUT, PROFILE, ("--arena-mib", str(ARENA_MIB))) as launch, FlowGenerator() as generator:
        pids = launch.cpu_parts["proxy"]
        served, lasts_s = 0, FIRST_GUESS_S
        for batch in range(BATCHES + 1):
            size = counted // BATCHES if batch else warm_up
            run = generator.run(launch.url, _flows(launch.model, size, lasts_s, batch), within_s=BATCH_LIMIT_S)
            bad += [one for one in run.outcomes if one.verdict not in (GOOD, LEFT)]
            left = sum(one.verdict == LEFT for one in run.outcomes)
            lasts_s = statistics.median(one.whole_s for one in run.outcomes if one.verdict == GOOD)
            until(lambda: not held(launch.url), EMPTY_S)
            time.sleep(REST_S)
            served += len(run.outcomes) if batch else 0
            rows.append(_row(served, left, resident(pids)))
        still_held = held(launch.url)
    figures = {
        "rss_growth_mb_per_100k": round(growth([(row["served"], row["rss_mb"]) for row in rows], PER), 3),
        "uss_growth_mb_per_100k": round(growth([(row["served"], row["uss_mb"]) for row in rows], PER), 3),
        "memory_requests": float(served),
        "memory_left_share": round(sum(row["left"] for row in rows[1:]) / max(served, 1), 4),
        "memory_errors": float(len(bad)),
        "held_after_all_ended": float(sum(still_held.values())),
    }
    said = sorted({f"{one.verdict}: {one.said}" for one in bad})[:5]
    kept = f"\nstill held: {still_held}" if still_held else ""
    return Found(figures, [*rows, {"errors": said, "held": still_held}], f"{_table(rows)}{kept}{''.join(said)}")


PART = Part(
    "memory",
    "growth of the proxy's memory, a tenth of the clients leaving",
    measure,
    (
        Goal("held_after_all_ended", "==", 0.0, "no load leaks, whatever the ending"),
        Goal("memory_errors", "==", 0.0),
    ),
)


def _flows(model: str, count: int, lasts_s: float, batch: int) -> list[Flow]:
    """`lasts_s`: how long a request takes; clients that leave do so at every moment of it."""
    bodies = []
    for turn in range(PICTURES):
        stream = turn % 2 == 0
        bodies.append(text(model, tokens=64, answer=16, stream=stream, seed=turn))
        bodies.append(text(model, tokens=16, answer=8, stream=not stream, seed=turn))
        bodies.append(picture(model, side=112, answer=8, stream=stream, seed=turn))
    return [
        Flow(
            "mixed",
            bodies,
            at_once=AT_ONCE,
            count=count,
            leave_share=LEAVE_SHARE,
            leave_within_s=lasts_s,
            seed=batch,
        )
    ]


def _row(served: int, left: int, memory: Resident) -> Row:
    return {"served": served, "left": left, "rss_mb": round(memory.rss_mb, 3), "uss_mb": round(memory.uss_mb, 3)}


def _table(rows: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [("requests after the warm-up", "left in this batch", "RSS MiB", "USS MiB")]
    lines += [(str(row["served"]), str(row["left"]), f"{row['rss_mb']:.1f}", f"{row['uss_mb']:.1f}") for row in rows]
    return table(lines)
