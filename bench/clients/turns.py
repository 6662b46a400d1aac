"""Requests in turns over launches that are up at once, and what each request took. The measuring loop of the TTFTs.

Launches take turns, in an order drawn for every turn, one request at a time: a noisy machine meets them alike. Each
request has an image of its own, unless `repeated` asks for the hits of every cache.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.clients.records import RequestRecord
from bench.clients.sender import ask
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH, Milestone, groups, hidden, means, phases
from bench.processes import cpu_seconds, since
from bench.served import Served
from bench.stamps import Timeline
from bench.statistic import percentile
from bench.workloads.seeded_rng import seeded_rng
from bench.workloads.synthetic import DemoImage, demo_body, demo_image
from deploy.placement_table import table

MODES = ("unique", "repeated")
TABLES = {
    "groups_ms": "group",
    "phases_ms": "phase",
    "hidden_ms": "between two stamps, hidden or not",
    "cpu_ms": "CPU of the whole request",
}


@dataclass(frozen=True)
class Contender:
    """Something to ask: a layout through its proxy, or a monolith past it."""

    name: str
    url: str
    launch: Served
    milestones: tuple[Milestone, ...]


@dataclass(frozen=True)
class Turn:
    """One measured request. `right`: the answer was; None: a model with random weights has no right answer."""

    contender: Contender
    mode: str
    turn: int
    record: RequestRecord
    right: bool | None
    cpu_s: Mapping[str, float]


class Images:
    """Demo images, each drawn once, none twice."""

    def __init__(self, size: int) -> None:
        self._size, self._seeds = size, itertools.count(1)

    def new(self) -> DemoImage:
        return demo_image(next(self._seeds), self._size)


def contenders_of(launch: Served) -> list[Contender]:
    """The launch through its proxy; a monolith also past it, so that the proxy's part shows."""
    direct = launch.stage_url("EPD")
    if direct is None:
        return [Contender(launch.name, launch.url, launch, DISAGGREGATED)]
    return [
        Contender(launch.name, launch.url, launch, MONOLITH),
        Contender(f"{launch.name} past the proxy", direct, launch, DIRECT),
    ]


def warm_up(contenders: Sequence[Contender], images: Images, count: int) -> None:
    """`count` requests to each that are not measured."""
    for one, _ in itertools.product(contenders, range(count)):
        ask(one.url, demo_body(one.launch.model, images.new()))


def in_turns(
    contenders: Sequence[Contender], mode: str, images: Images, *, requests: int, pause_s: float, trained: bool = True
) -> list[Turn]:
    """`requests` measured turns. The pause before each request lets the remains of the one before end.

    Raises:
        StageError: a request was not answered whole.
    """
    rng, same = seeded_rng("turns"), {one.name: images.new() for one in contenders}
    turns = []
    for turn in range(-1 if mode == "repeated" else 0, requests):  # turn -1 fills the caches
        for one in [contenders[at] for at in rng.permutation(len(contenders))]:
            image = same[one.name] if mode == "repeated" else images.new()
            time.sleep(pause_s)
            before = cpu_seconds(one.launch.cpu_parts)
            record = ask(one.url, demo_body(one.launch.model, image))
            cpu_s = since(before, cpu_seconds(one.launch.cpu_parts))
            if turn >= 0:
                turns.append(Turn(one, mode, turn, record, record.text == image.answer if trained else None, cpu_s))
    return turns


def row_of(turn: Turn, timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Everything about a request, in milliseconds from sending. The phases and the residual add up to the TTFT.

    Args:
        timelines: by name of the launch.
    """
    record, milestones = turn.record, turn.contender.milestones
    assert record.sent_s is not None and record.first_s is not None, "the answer was whole"
    sent_s, ttft_s = record.sent_s, record.first_s - record.sent_s
    events = {**timelines[turn.contender.launch.name].named(record.id), "first_content": record.first_s}
    taken = phases(milestones, events, sent_s)
    seconds = {
        "phases_ms": taken,
        "groups_ms": groups(milestones, taken),
        "hidden_ms": hidden(events),
        "cpu_ms": turn.cpu_s,
        "stamps_ms": {name: at - sent_s for name, at in events.items()},
    }
    return {
        "target": turn.contender.name,
        "mode": turn.mode,
        "turn": turn.turn,
        "right": turn.right,
        "ttft_ms": _ms(ttft_s),
        "total_ms": _ms(record.ended_s - sent_s),
        "residual_ms": _ms(ttft_s - sum(taken.values())),
        **{kind: {name: _ms(value) for name, value in values.items()} for kind, values in seconds.items()},
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def summarise(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Per contender: median and p90 of the TTFT, its ratio to the first one, mean per phase (means add up)."""
    figures: dict[str, dict[str, Any]] = {}
    for name in names:
        own = [row for row in rows if row["target"] == name]
        ttft = [row["ttft_ms"] for row in own]
        figures[name] = {
            "median_ms": statistics.median(ttft),
            "p25_ms": percentile(ttft, 25),
            "p90_ms": percentile(ttft, 90),
            "mean_ms": statistics.fmean(ttft),
            **({} if own[0]["right"] is None else {"right": statistics.fmean(row["right"] for row in own)}),
            "residual_ms": statistics.fmean(row["residual_ms"] for row in own),
            **{kind: means([row[kind] for row in own]) for kind in TABLES},
        }
    for figure in figures.values():
        figure["ratio"] = figure["median_ms"] / figures[names[0]]["median_ms"]
    return figures


def text(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of one mode: TTFT per contender, then where each one's time went."""
    rows: list[tuple[str, ...]] = [("target", "median ms", "p25", "p90", "mean", "ratio", "right answers")]
    for name, figure in figures.items():
        numbers = (f"{figure[key]:.1f}" for key in ("median_ms", "p25_ms", "p90_ms", "mean_ms"))
        rows.append((name, *numbers, f"{figure['ratio']:.2f}", f"{figure['right']:.0%}" if "right" in figure else "-"))
    parts = [table(rows)]
    for name, figure in figures.items():
        for kind, title in TABLES.items():
            if len(figure[kind]) > 1:
                lines = [(f"{name}: {title}", "mean ms")]
                lines += [(part, f"{milliseconds:.1f}") for part, milliseconds in figure[kind].items()]
                if kind == "phases_ms":
                    lines.append(("residual", f"{figure['residual_ms']:.1f}"))
                parts.append(table(lines))
    return "\n\n".join(parts)
