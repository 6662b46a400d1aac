"""P and D that become each other under load: what a flip takes, and what clients notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from bench.change.deployment import commanded
from bench.change.loads import PROFILE, judged, simulated_flows
from bench.clients.process import SenderProcess
from bench.served import simulated

LAYOUT = "2P-2D"
COUNTS = ({"P": 1, "D": 3}, {"P": 2, "D": 2}, {"P": 3, "D": 1}, {"P": 2, "D": 2})
FLIP_S = 2.0
"""At most, with the pause between two: for how long the load lasts."""
APART_S = 0.3
LIMIT_S = 60.0


def flips(count: int, per_s: float) -> Iterator[dict[str, Any]]:
    """So many flips, one after another."""
    with simulated(LAYOUT, PROFILE, ["--switchable"]) as launch, commanded(launch) as deployment:
        seconds = count * (FLIP_S + APART_S)
        with SenderProcess() as sender:
            begun = time.perf_counter()
            sender.start(launch.url, *simulated_flows(launch.model, seconds, per_s), limit_s=LIMIT_S, decode=True)
            for turn in range(count):
                time.sleep(APART_S)
                if time.perf_counter() > begun + seconds:  # the load is over: what it notices no more is no flip
                    break
                change = deployment.scale(COUNTS[turn % len(COUNTS)])
                done = [step["action"] for step in change["steps"]]
                yield {
                    "part": "flips",
                    "to": change.get("to", ""),
                    "seconds": change["seconds"],
                    "client_s": change.get("client_s", 0.0),
                    "flipped": change.get("state") == "done" and "flip" in done and "start" not in done,
                    "why": change.get("refused") or change.get("reason", ""),
                }
            run = sender.finish()
        yield from judged(run.rows).rows("flips", run.begun_s)
