"""Requests in turns over launches that are up at once, and what each request took. The measuring loop of the TTFTs.

Targets take turns, in an order drawn for every turn, one request at a time: a noisy machine meets them alike. Each
request has a picture of its own, unless `repeated` asks for the hits of every cache.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.chat import Answer, Picture, ask, body, picture
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH, Milestone, groups, hidden, phases
from bench.processes import cpu_seconds, since
from bench.served import Served
from bench.stamps import Timeline
from bench.statistic import percentile
from deploy.placement_table import table

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
    right: bool | None  # None: a model with random weights has no right answer
    cpu_s: dict[str, float]


class Pictures:
    """Pictures, each drawn once, none twice."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seed = 0

    def new(self) -> Picture:
        self._seed += 1
        return picture(self._seed, self._size)


def targets_of(launch: Served) -> list[Target]:
    """The launch through its proxy; a monolith also past it, so that the proxy's part shows."""
    direct = launch.stage_url("EPD")
    if direct is None:
        return [Target(launch.name, launch.url, launch, DISAGGREGATED)]
    return [
        Target(launch.name, launch.url, launch, MONOLITH),
        Target(f"{launch.name} past the proxy", direct, launch, DIRECT),
    ]


def ask_all(
    client: httpx.Client,
    targets: Sequence[Target],
    mode: str,
    pictures: Pictures,
    *,
    requests: int,
    pause_s: float,
    trained: bool = True,
) -> list[Asked]:
    """`requests` measured turns. The pause before each request lets the remains of the one before end."""
    chance = random.Random(0)
    repeated = {target.name: pictures.new() for target in targets}
    asked = []
    for turn in range(-1 if mode == "repeated" else 0, requests):  # turn -1 fills the caches
        for target in chance.sample(list(targets), len(targets)):
            shown = repeated[target.name] if mode == "repeated" else pictures.new()
            time.sleep(pause_s)
            before = cpu_seconds(target.launch.cpu_parts)
            answer = ask(client, target.url, body(target.launch.model, shown))
            cpu_s = since(before, cpu_seconds(target.launch.cpu_parts))
            if turn >= 0:
                right = answer.text == shown.answer if trained else None
                asked.append(Asked(target.name, mode, turn, answer, right, cpu_s))
    return asked


def row_of(one: Asked, targets: Mapping[str, Target], timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Everything about a request, in milliseconds. The phases and the residual add up to the TTFT."""
    target, answer = targets[one.target], one.answer
    events = timelines[target.launch.name].of(answer.request_id) if answer.request_id else {}
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
            **({} if own[0]["right"] is None else {"right": statistics.fmean(row["right"] for row in own)}),
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


def text(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of one mode: TTFT per target, then where each target's time went."""
    rows: list[tuple[str, ...]] = [("target", "median ms", "p25", "p90", "mean", "ratio", "right answers")]
    for name, figure in figures.items():
        numbers = (f"{figure[key]:.1f}" for key in ("median_ms", "p25_ms", "p90_ms", "mean_ms"))
        rows.append((name, *numbers, f"{figure['ratio']:.2f}", f"{figure['right']:.0%}" if "right" in figure else "-"))
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
