"""Layout after layout under load: real stages through a walk of six, simulated ones through layouts at random."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.change.deployment import Deployment, commanded
from bench.change.loads import LIMIT_S, Judged, at_rest, demo_flows, judged
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.served import served

LAYOUTS = ("EP-D", "E-P-D", "(E-P)-D", "(E-PD)x2", "TP1x2", "EP-D")
PAUSE_S = 120.0
STEP_S = 5.0
"""Of load between two changes."""

Row = dict[str, Any]


def walk(seconds: float, flags: Sequence[str] = ("--device", "cpu")) -> Iterator[Row]:
    """Real stages, the demo model; goes round until the time is over. Where the machine has no room for two layouts
    side by side, new requests wait."""
    with served(LAYOUTS[0], flags, traced=False) as launch, commanded(launch) as deployment:
        flows, layouts = demo_flows(launch.model, seconds), iter(LAYOUTS[1:] * 100)
        yield from walked("walk", launch.url, deployment, flows, layouts, seconds, keep_text=True)


def walked(
    part: str,
    url: str,
    deployment: Deployment,
    flows: list[Flow],
    layouts: Iterator[str],
    seconds: float,
    *,
    keep_text: bool = False,
) -> Iterator[Row]:
    """Layout after layout under load. A row per change, then what became of the requests."""
    with SenderProcess() as sender:
        begun = time.perf_counter()
        sender.start(url, *flows, limit_s=LIMIT_S, decode=True, keep_text=keep_text)
        for row in _steps(deployment, layouts, begun + seconds):
            yield {"part": part, **row}
        run = sender.finish()
        found: Judged = judged(run.rows, at_rest=at_rest(url, flows))
        yield from found.rows(part, run.begun_s)


def _steps(deployment: Deployment, layouts: Iterator[str], until: float) -> Iterator[Row]:
    """Change after change, as long as the slowest one until now would have the time."""
    slowest_s = 0.0
    time.sleep(STEP_S)
    while time.perf_counter() + slowest_s + STEP_S < until:
        layout = next(layouts)
        change = deployment.relayout(layout)
        if "refused" in change:
            change = {"refused": change["refused"], **deployment.relayout(layout, PAUSE_S)}
        slowest_s = max(slowest_s, change["seconds"])
        yield _row(change)
        time.sleep(STEP_S)


def _row(change: Row) -> Row:
    names = ("from", "to", "state", "reason", "seconds", "paused_s", "cut_requests", "refused")
    return {name: change[name] for name in names if name in change}
