"""`epd-bench ttft --mechanism`: one layout with and without each part of the E→P mechanism, on real stages.

EPD-Serve's Table 2 asks what asynchronous prefetching brings to the TTFT; here each part is taken away alone: features
fetched on demand instead of on their event, pixels sent to P and D instead of metadata, Mooncake instead of the arena.
The whole mechanism stays up, and each variant takes turns with it, pair by pair, so that both of a pair meet the same
machine. One request at a time: what is seen is latency on an idle P, not what queues hide.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.chat import ask, body
from bench.record import environment, write
from bench.served import Served, served
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
VARIANTS = {
    "event": Variant("fetched on demand", "ttft_demand_over_event", ("--feature-prefetch", "demand")),
    "metadata": Variant("pixels to P and D", "ttft_pixels_over_metadata", ("--send-pixels", "always")),
    "arena": Variant("through Mooncake", "ttft_mooncake_over_arena", ("--mm-store", "mooncake")),
}


def run(arguments: argparse.Namespace, argv: Sequence[str], model: tuple[str, ...]) -> int:
    """One variant after the other beside the whole mechanism; print the tables, write the result."""
    env = environment(argv, asked=arguments)
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    lines: list[tuple[str, ...]] = [("without", "TTFT ms", "whole mechanism ms", "ratio of pairs")]
    with served(LAYOUT, model, name=WHOLE) as whole:
        pictures = Pictures(arguments.size)
        for variant in (VARIANTS[name] for name in arguments.without.split(",")):
            with served(LAYOUT, (*model, *variant.flags), name=variant.name) as without:
                pair = _compare(without, whole, pictures, arguments)
            rows += [{**row, "compared": variant.name} for row in pair]
            figures |= pair_figures(variant, pair)
            lines.append(line(variant, pair))
    kind = f"real stages, {arguments.preset} model, {LAYOUT}, {arguments.size}² pictures"
    print(f"\n{kind}, {arguments.requests} pairs each, median (quartiles)\n\n{table(lines)}")
    write(arguments.json, figures, env, rows)
    return 0


def pair_figures(variant: Variant, pair: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The ratio under the variant's name, with its quartiles and both medians."""
    ratio = paired_ratio(pair, variant.name, WHOLE)
    return {
        variant.figure: ratio.median,
        f"{variant.figure}_p25": ratio.p25,
        f"{variant.figure}_p75": ratio.p75,
        f"{variant.figure}/without_ms": Spread.of(_ttft(pair, variant.name)).median,
        f"{variant.figure}/whole_ms": Spread.of(_ttft(pair, WHOLE)).median,
    }


def line(variant: Variant, pair: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    without, whole = (Spread.of(_ttft(pair, name)) for name in (variant.name, WHOLE))
    return variant.name, f"{without:.1f}", f"{whole:.1f}", f"{paired_ratio(pair, variant.name, WHOLE):.2f}"


def paired_ratio(rows: Sequence[dict[str, Any]], of: str, over: str) -> Spread:
    """TTFT of one target over the other's, turn by turn: what slows the machine down slows both of a pair."""
    base = {row["turn"]: row["ttft_ms"] for row in rows if row["target"] == over}
    return Spread.of([row["ttft_ms"] / base[row["turn"]] for row in rows if row["target"] == of])


def _ttft(rows: Sequence[dict[str, Any]], target: str) -> list[float]:
    return [row["ttft_ms"] for row in rows if row["target"] == target]


def _compare(without: Served, whole: Served, pictures: Pictures, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    targets = [target for launch in (whole, without) for target in targets_of(launch)]
    with httpx.Client(timeout=120, trust_env=False) as client:
        for target in targets:
            for _ in range(arguments.warmup):
                ask(client, target.url, body(target.launch.model, pictures.new()))
        turns = {"requests": arguments.requests, "pause_s": arguments.pause, "trained": arguments.preset == "demo"}
        asked = ask_all(client, targets, "unique", pictures, **turns)
    timelines = {launch.name: Timeline(read_stamps(launch.traces)) for launch in (whole, without)}
    rows = [row_of(one, {target.name: target for target in targets}, timelines) for one in asked]
    print(f"\n{text(summarise(rows, targets))}", flush=True)
    return rows
