"""`epd-bench ttft`: time to first token of a demo picture, layouts against each other on the same cores.

All layouts are up at once and take turns, in an order drawn for every turn, one request at a time: a noisy machine
meets them alike (an idle vLLM uses no CPU; the share it does use is in the record). Each request has a picture of its
own, unless `repeated` asks for the hits of every cache. A monolith is asked twice per turn, through the proxy and
past it, so that the proxy's part shows. A pause before each request lets the previous one's remains end: stages that
tidy up, OpenMP threads that spin. Two cores cannot show a gain from overlap; this shows what the split costs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.chat import Answer, Picture, ask, body, picture
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH, Milestone, groups, hidden, phases
from bench.processes import cpu_seconds, since
from bench.record import record, write
from bench.served import Served, served
from bench.stamps import Timeline, read_stamps
from bench.statistic import percentile
from deploy.placement_table import table

IDLE_S = 5.0
MODES = ("unique", "repeated")


@dataclass(frozen=True)
class Target:
    """Something to ask: a layout through its proxy, or a monolith past it."""

    name: str
    url: str
    launch: Served
    milestones: tuple[Milestone, ...]


@dataclass(frozen=True)
class Asked:
    """One measured request."""

    target: str
    mode: str
    turn: int
    answer: Answer
    right: bool
    cpu_s: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", default="TP1,(E-P)-D", help="comma-separated; ratios are to the first")
    parser.add_argument("--requests", type=int, default=30, help="measured requests per target and mode")
    parser.add_argument("--warmup", type=int, default=5, help="requests per target before measuring")
    parser.add_argument("--modes", default=",".join(MODES), help="unique and/or repeated pictures")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between requests")
    parser.add_argument("--size", type=int, default=224, help="picture width and height in pixels")
    parser.add_argument("--output", type=Path, default=Path("bench/results/ttft.json"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the tables, write the record."""
    head = record(argv)
    modes = arguments.modes.split(",")
    with contextlib.ExitStack() as stack:
        launches = [stack.enter_context(served(layout)) for layout in arguments.layouts.split(",")]
        targets = [target for launch in launches for target in _targets(launch)]
        client = stack.enter_context(httpx.Client(timeout=120, trust_env=False))
        pictures = _Pictures(arguments.size)
        for target in targets:
            for _ in range(arguments.warmup):
                ask(client, target.url, body(target.launch.model, pictures.new()))
        idle = _idle_share(launches)
        asked = [one for mode in modes for one in _ask_all(client, targets, mode, pictures, arguments)]
        timelines = {launch.layout: Timeline(read_stamps(launch.traces)) for launch in launches}
    rows = [_row(one, {target.name: target for target in targets}, timelines) for one in asked]
    summary = {mode: summarise([row for row in rows if row["mode"] == mode], targets) for mode in modes}
    for mode, figures in summary.items():
        print(f"\n{mode} pictures, {arguments.requests} requests per target (real)\n\n{_text(figures)}")
    print("\nidle CPU, share of one core: " + ", ".join(f"{name} {share:.3f}" for name, share in idle.items()))
    write(arguments.output, {**head, "idle_cpu_share": idle, "summary": summary, "rows": rows})
    return 0


class _Pictures:
    """Pictures, each drawn once, none twice."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seed = 0

    def new(self) -> Picture:
        self._seed += 1
        return picture(self._seed, self._size)


def _targets(launch: Served) -> list[Target]:
    direct = launch.stage_url("EPD")
    if direct is None:
        return [Target(launch.layout, launch.url, launch, DISAGGREGATED)]
    return [
        Target(launch.layout, launch.url, launch, MONOLITH),
        Target(f"{launch.layout} past the proxy", direct, launch, DIRECT),
    ]


def _ask_all(
    client: httpx.Client, targets: Sequence[Target], mode: str, pictures: _Pictures, arguments: argparse.Namespace
) -> list[Asked]:
    chance = random.Random(0)
    repeated = {target.name: pictures.new() for target in targets}
    asked = []
    for turn in range(-1 if mode == "repeated" else 0, arguments.requests):  # turn -1 fills the caches
        for target in chance.sample(list(targets), len(targets)):
            shown = repeated[target.name] if mode == "repeated" else pictures.new()
            time.sleep(arguments.pause)
            before = cpu_seconds(target.launch.cpu_parts)
            answer = ask(client, target.url, body(target.launch.model, shown))
            cpu_s = since(before, cpu_seconds(target.launch.cpu_parts))
            if turn >= 0:
                asked.append(Asked(target.name, mode, turn, answer, answer.text == shown.answer, cpu_s))
    return asked


def _idle_share(launches: Sequence[Served]) -> dict[str, float]:
    """CPU that each launch uses while nothing is asked of it, as a share of one core."""
    before = [cpu_seconds(launch.cpu_parts) for launch in launches]
    time.sleep(IDLE_S)
    after = [cpu_seconds(launch.cpu_parts) for launch in launches]
    return {
        f"{launch.layout} {part}": round(spent / IDLE_S, 4)
        for launch, pair in zip(launches, zip(before, after, strict=True), strict=True)
        for part, spent in since(*pair).items()
    }


def _row(one: Asked, targets: dict[str, Target], timelines: dict[str, Timeline]) -> dict[str, Any]:
    """Everything about a request, in milliseconds. The phases and the residual add up to the TTFT."""
    target, answer = targets[one.target], one.answer
    events = timelines[target.launch.layout].of(answer.request_id) if answer.request_id else {}
    events = {**events, "first_content": answer.first_content}
    taken = phases(target.milestones, events, answer.sent)
    return {
        "target": one.target,
        "mode": one.mode,
        "turn": one.turn,
        "right": one.right,
        "ttft_ms": _ms(answer.ttft_s),
        "total_ms": _ms(answer.ended - answer.sent),
        "residual_ms": _ms(answer.ttft_s - sum(taken.values())),
        "phases_ms": {name: _ms(seconds) for name, seconds in taken.items()},
        "groups_ms": {name: _ms(seconds) for name, seconds in groups(target.milestones, taken).items()},
        "hidden_ms": {name: _ms(seconds) for name, seconds in hidden(events).items()},
        "cpu_ms": {name: _ms(seconds) for name, seconds in one.cpu_s.items()},
        "stamps_ms": {name: _ms(at - answer.sent) for name, at in events.items()},
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def summarise(rows: Sequence[dict[str, Any]], targets: Sequence[Target]) -> dict[str, dict[str, Any]]:
    """Per target: median and p90 of the TTFT, its ratio to the first target, mean per phase (means add up)."""
    figures: dict[str, dict[str, Any]] = {}
    for target in targets:
        own = [row for row in rows if row["target"] == target.name]
        ttft = [row["ttft_ms"] for row in own]
        figures[target.name] = {
            "median_ms": statistics.median(ttft),
            "p25_ms": percentile(ttft, 25),
            "p90_ms": percentile(ttft, 90),
            "mean_ms": statistics.fmean(ttft),
            "right": statistics.fmean(row["right"] for row in own),
            "residual_ms": statistics.fmean(row["residual_ms"] for row in own),
            **{name: _means([row[name] for row in own]) for name in ("groups_ms", "phases_ms", "hidden_ms", "cpu_ms")},
        }
    base = figures[targets[0].name]["median_ms"]
    for figure in figures.values():
        figure["ratio"] = figure["median_ms"] / base
    return figures


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over all rows; a row without a phase spent nothing in it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in names}


def _text(figures: dict[str, dict[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [("target", "median ms", "p25", "p90", "mean", "ratio", "right answers")]
    for name, figure in figures.items():
        numbers = (f"{figure[key]:.1f}" for key in ("median_ms", "p25_ms", "p90_ms", "mean_ms"))
        rows.append((name, *numbers, f"{figure['ratio']:.2f}", f"{figure['right']:.0%}"))
    parts = [table(rows)]
    for name, figure in figures.items():
        kinds = ("groups_ms", "phases_ms", "hidden_ms", "cpu_ms")
        titles = ("group", "phase", "between two stamps, hidden or not", "CPU of the whole request")
        for kind, title in zip(kinds, titles, strict=True):
            if len(figure[kind]) > 1:
                lines = [(f"{name}: {title}", "mean ms")]
                lines += [(part, f"{milliseconds:.1f}") for part, milliseconds in figure[kind].items()]
                if kind == "phases_ms":
                    lines.append(("residual", f"{figure['residual_ms']:.1f}"))
                parts.append(table(lines))
    return "\n\n".join(parts)
