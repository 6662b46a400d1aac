"""`epd-bench ttft --mechanism`: one layout with and without each part of the E→P mechanism, on real stages.

EPD-Serve's Table 2 asks what asynchronous prefetching brings to the TTFT; here each part is taken away alone: features
fetched on demand instead of on their event, pixels sent to P and D instead of metadata, Mooncake instead of the arena.
The whole mechanism and the one without a part are up at the same time and take turns, pair by pair, so both meet the
same machine. One request at a time: what is seen is latency on an idle P, not what queues hide.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.chat import ask, body
from bench.record import environment, flatten, write
from bench.served import served
from bench.stamps import Timeline, read_stamps
from bench.statistic import Spread
from bench.turns import Pictures, ask_all, row_of, summarise, targets_of, text
from deploy.placement_table import table

LAYOUT = "(E-P)-D"


@dataclass(frozen=True)
class Variant:
    """The mechanism without one part: what that part is called, and the flags that take it away."""

    name: str
    figure: str
    flags: tuple[str, ...]


WHOLE = "event, metadata, arena"
VARIANTS = (
    Variant("fetched on demand", "ttft_demand_over_event", ("--feature-prefetch", "demand")),
    Variant("pixels to P and D", "ttft_pixels_over_metadata", ("--send-pixels", "always")),
    Variant("through Mooncake", "ttft_mooncake_over_arena", ("--mm-store", "mooncake")),
)


def run(arguments: argparse.Namespace, argv: Sequence[str], model: tuple[str, ...]) -> int:
    """One pair of launches after the other; print the tables, write the result."""
    env = environment(argv)
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    lines: list[tuple[str, ...]] = [("without", "TTFT ms", "whole mechanism ms", "ratio of pairs")]
    for variant in VARIANTS:
        pair = [{**row, "compared": variant.name} for row in _pair(variant, arguments, model)]
        rows += pair
        ratio = paired_ratio(pair, variant.name, WHOLE)
        figures[variant.figure] = ratio.median
        figures |= {f"{variant.figure}_p25": ratio.p25, f"{variant.figure}_p75": ratio.p75}
        without, whole = (Spread.of(_ttft(pair, name)) for name in (variant.name, WHOLE))
        figures |= flatten({variant.figure: {"without_ms": without.median, "whole_ms": whole.median}})
        lines.append((variant.name, f"{without:.1f}", f"{whole:.1f}", f"{ratio:.2f}"))
    kind = f"real stages, {arguments.preset} model, {LAYOUT}, {arguments.size}² pictures"
    print(f"\n{kind}, {arguments.requests} pairs each, median (quartiles)\n\n{table(lines)}")
    write(arguments.json, figures, env, rows)
    return 0


def paired_ratio(rows: Sequence[dict[str, Any]], of: str, over: str) -> Spread:
    """TTFT of one target over the other's, turn by turn: what slows the machine down slows both of a pair."""
    base = {row["turn"]: row["ttft_ms"] for row in rows if row["target"] == over}
    return Spread.of([row["ttft_ms"] / base[row["turn"]] for row in rows if row["target"] == of])


def _ttft(rows: Sequence[dict[str, Any]], target: str) -> list[float]:
    return [row["ttft_ms"] for row in rows if row["target"] == target]


def _pair(variant: Variant, arguments: argparse.Namespace, model: tuple[str, ...]) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        launches = [
            stack.enter_context(served(LAYOUT, model, name=WHOLE)),
            stack.enter_context(served(LAYOUT, (*model, *variant.flags), name=variant.name)),
        ]
        targets = [target for launch in launches for target in targets_of(launch)]
        client = stack.enter_context(httpx.Client(timeout=120, trust_env=False))
        pictures = Pictures(arguments.size)
        for target in targets:
            for _ in range(arguments.warmup):
                ask(client, target.url, body(target.launch.model, pictures.new()))
        asked = ask_all(client, targets, "unique", pictures, requests=arguments.requests, pause_s=arguments.pause)
        timelines = {launch.name: Timeline(read_stamps(launch.traces)) for launch in launches}
    rows = [row_of(one, {target.name: target for target in targets}, timelines) for one in asked]
    print(f"\n{text(summarise(rows, targets))}", flush=True)
    return rows
