"""`epd-bench budgets`: what it is worth that stages hold their steps to an SLO, on real stages (`bench` preset, CPU).

Two servers of each layout are up together, with budgets and without (`--step-budgets`), and take turns: texts are
streamed all the time, several at once, and images come in bursts.

    tp1         TP1: token gaps, as images are encoded and prefilled between tokens
    colocated   (E-PD): the same, with the encoder in a process of its own on the same device
    ep          EP-D: time to first token of texts whose prompts queue behind images at the EP
    throughput  TP1 under an SLO that nothing comes near: what it costs that budgets are kept

The SLO is what this machine can keep with one image at a time (`--slo` names another), and not with a burst. Requests
are judged by it twice, by their mean time per token and by nine in ten of their gaps (`epd_serve/slo.py`).

What `layouts` shows of budgets at a rate, by token gaps, over plain vLLM: docs/guides/tuning.md has the command.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.slo import attainment
from bench.clients.target import requests
from bench.micro.colocation.mix import EVERY_TOKEN, stream_body
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, in_turns, one_of, several, whole
from bench.micro.rows import grouped, ratios
from bench.real_stages import LIMIT_S, add_engine_flags, check_memory, closed_loop, engine_flags, kind_of, seconds_of
from bench.served import Served, scratch, served
from bench.statistic import percentile
from bench.workloads.synthetic import image_body
from epd_serve.errors import StageError
from epd_serve.slo import JUDGE, MEAN, Slo, parse_slos

ON, OFF = "on", "off"
LAYOUTS = {"tp1": "TP1", "colocated": "(E-PD)", "ep": "EP-D", "throughput": "TP1"}
STAGES = {"tp1": 1, "colocated": 2, "ep": 2, "throughput": 1}
TEXT, IMAGE = "text", "image"
EASY = Slo(3_600_000, 3_600_000)
"""Nothing comes near it."""
GOALS = (
    Goal("tp1_gap_p99_ratio", "<=", 0.8),
    Goal("colocated_gap_p99_ratio", "<=", 0.8),
    Goal("ep_text_ttft_ratio", "<=", 0.9),
    Goal("attained_points_worst", ">=", 0),
    Goal("attained_points_best", ">=", 5),
    Goal("throughput_ratio", ">=", 0.98),
)
FLAGS = {
    "--only": flag("parts of it", tuple(LAYOUTS), several(one_of(*LAYOUTS))),
    "--rounds": flag("turns of each server", Usually(6, quick=2), whole()),
    "--bursts": flag("of images in a turn", Usually(4, quick=2), whole()),
    "--images": flag("of a burst", 6, whole()),
    "--side": flag("of an image in pixels", 448, whole(28)),
    "--texts": flag("streams at a time", 4, whole()),
    "--slo": flag("TTFT:TPOT in milliseconds; without it what this machine can keep"),
}
TEXT_TOKENS, SHORT_TOKENS, IMAGE_TOKENS, PROMPT = 24, 4, 8, 64
BURST_S = 4.0
"""From one burst to the next."""
OVER = {"tp1": (2.5, 1.25), "colocated": (2.5, 1.25), "ep": (1.5, 3.0)}
"""The SLO, TTFT and token gap, over what one image at a time takes: an image step has a quarter to spare. D of EP-D,
which no image comes to, has gaps of its own to spare."""
OPEN_PER_S = {"ep": 4.0}
"""Texts a second that come whether or not others are answered: a loop would send fewest while all wait longest."""


@dataclass(frozen=True)
class Load:
    """Of a turn.

    Attributes:
        tokens: of a text's answer. open_per_s: texts that come by the clock; 0: `texts` at a time.
    """

    bursts: int
    images: int
    side: int
    texts: int
    tokens: int
    open_per_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.bursts * BURST_S

    def flows(self, model: str, seed: int) -> list[Flow]:
        numbers = itertools.count(seed * 1000)
        images = [self.image(model, next(numbers)) for _ in range(self.bursts * self.images)]
        dues = [1.0 + burst * BURST_S for burst in range(self.bursts) for _ in range(self.images)]
        texts = requests(self.texts_of(model, seed, 200))
        if self.open_per_s:
            moments = [number / self.open_per_s for number in range(round(self.open_per_s * self.seconds))]
            flow = Flow(texts, TEXT, dues=moments)
        else:
            flow = Flow(texts, TEXT, concurrency=self.texts, duration_s=self.seconds)
        return [flow, Flow(requests(images), IMAGE, dues=dues)]

    def texts_of(self, model: str, seed: int, count: int) -> list[dict[str, Any]]:
        return [stream_body(model, 10_000 * seed + number, PROMPT, self.tokens) for number in range(count)]

    def image(self, model: str, seed: int) -> dict[str, Any]:
        return image_body(model, side=self.side, answer=IMAGE_TOKENS, stream=True, seed=seed) | EVERY_TOKEN


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per turn."""
    if arguments.engine == "vllm":
        check_memory(2 * max(STAGES[part] for part in arguments.only))
    given = parse_slos(arguments.slo)[0] if arguments.slo else None
    with scratch() as folder, SenderProcess() as sender:
        common = engine_flags(arguments, folder)
        for part in arguments.only:
            tokens = SHORT_TOKENS if part == "ep" else TEXT_TOKENS
            per_s = OPEN_PER_S.get(part, 0.0)
            load = Load(arguments.bursts, arguments.images, arguments.side, arguments.texts, tokens, per_s)
            with contextlib.ExitStack() as stack:
                off = stack.enter_context(_up(part, OFF, EASY, common))
                slo = EASY if part == "throughput" else given or keeps(off, sender, load, *OVER[part])
                launches = [off, stack.enter_context(_up(part, ON, slo, common))]
                print(f"{part}: {LAYOUTS[part]} with budgets and without, SLO {slo}", flush=True)
                for launch in launches:
                    _turn(part, sender, launch, load, slo, -1)  # first uses, and what steps take
                for turn, launch in in_turns(launches, arguments.rounds, shown=part):
                    yield _turn(part, sender, launch, load, slo, turn)


def _up(part: str, budgets: str, slo: Slo, common: Sequence[str]) -> contextlib.AbstractContextManager[Served]:
    named = (f"slo.ttft_s={slo.ttft_ms / 1e3}", f"slo.tpot_s={slo.tpot_ms / 1e3}")
    flags = [*common, "--step-budgets", budgets, *(word for one in named for word in ("--proxy", one))]
    return served(LAYOUTS[part], flags, name=budgets, traced=False)


def keeps(launch: Served, sender: SenderProcess, load: Load, ttft_over: float, gap_over: float) -> Slo:
    """What a server keeps while texts are streamed and one image comes at a time, with something to spare."""
    closed_loop(sender, launch.url, [load.image(launch.model, -1), *load.texts_of(launch.model, -1, 2)], 2)
    texts = load.texts_of(launch.model, 900, 2 * load.texts)
    images = [load.image(launch.model, 900_000 + number) for number in range(load.images)]
    flows = [
        Flow(requests(texts), TEXT, concurrency=load.texts, count=len(texts)),
        Flow(requests(images), IMAGE, concurrency=1, count=len(images)),
    ]
    rows = sender.run(launch.url, *flows, within_s=LIMIT_S, limit_s=LIMIT_S, decode=True).rows
    ttft_s = [one.ttft_s for one in rows if one.kind == IMAGE and one.ttft_s is not None]
    longest_s = [max(one.itl_s) for one in rows if one.kind == TEXT and one.itl_s]
    if not (ttft_s and longest_s):
        raise StageError(f"{launch.url}: {rows[0].fault} {rows[0].error}", stage=launch.url)
    ttft_ms = ttft_over * float(np.median(ttft_s)) * 1e3
    return Slo(max(1, round(ttft_ms)), max(1, round(gap_over * float(np.median(longest_s)) * 1e3)))


def _turn(part: str, sender: SenderProcess, launch: Served, load: Load, slo: Slo, turn: int) -> Row:
    """Raises StageError: an answer was not good."""
    row = {"part": part, "budgets": launch.name, "round": turn, "slo": str(slo)}
    if part == "throughput":
        images = [load.image(launch.model, 1000 * turn + number) for number in range(load.bursts * load.images)]
        texts = load.texts_of(launch.model, turn, len(images))
        bodies = [body for pair in zip(texts, images, strict=True) for body in pair]
        records = closed_loop(sender, launch.url, bodies, 2 * load.texts, decode=True)
        tokens = sum(one.output_tokens for one in records)
        return {**row, "tokens_per_s": round(tokens / seconds_of(records), 3)}
    flows = load.flows(launch.model, turn)
    records = sender.run(launch.url, *flows, within_s=LIMIT_S, limit_s=LIMIT_S, decode=True).rows
    if bad := [one for one in records if not one.ok]:
        raise StageError(f"{launch.url}: {len(bad)} answers are not good: {bad[0].fault}: {bad[0].error}", stage=part)
    gaps_s = [gap_s for one in records for gap_s in one.itl_s]
    ttft_s = {kind: [one.ttft_s or 0.0 for one in records if one.kind == kind] for kind in (TEXT, IMAGE)}
    return {
        **row,
        "requests": len(records),
        "gap_p50_ms": round(percentile(gaps_s, 50) * 1e3, 3),
        "gap_p99_ms": round(percentile(gaps_s, 99) * 1e3, 3),
        **{f"{kind}_ttft_ms": round(float(np.mean(found)) * 1e3, 3) for kind, found in ttft_s.items()},
        "attained_mean": attainment(records, replace(slo, judge=MEAN)),
        "attained_gaps": attainment(records, replace(slo, judge=JUDGE)),
    }


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Ratios are of two turns of a round; attainment is of all turns."""
    found: dict[str, float] = {}
    points: list[float] = []
    for (part,), own in grouped(rows, "part").items():
        on, off = ([row for row in own if row["budgets"] == name] for name in (ON, OFF))
        for name, figure, of in FIGURES:
            if of == part and (ratio := ratios(on, off, name)) is not None:
                found[figure] = round(ratio.median, 4)
        if part == "throughput" or not (on and off):
            continue
        for judge in ("attained_mean", "attained_gaps"):
            share = {name: float(np.mean([row[judge] for row in of])) for name, of in ((ON, on), (OFF, off))}
            found |= {f"{part}_{judge}_{name}": round(value, 4) for name, value in share.items()}
            points.append(100 * (share[ON] - share[OFF]))
    if points:
        found |= {"attained_points_worst": round(min(points), 2), "attained_points_best": round(max(points), 2)}
    return found


FIGURES = (
    ("gap_p99_ms", "tp1_gap_p99_ratio", "tp1"),
    ("gap_p99_ms", "colocated_gap_p99_ratio", "colocated"),
    ("text_ttft_ms", "ep_text_ttft_ratio", "ep"),
    ("tokens_per_s", "throughput_ratio", "throughput"),
)


MEASUREMENT = Measurement(
    quick="2 turns of two bursts, within 6 minutes",
    flags=FLAGS,
    add_flags=add_engine_flags,
    about=kind_of,
    measure=measure,
    figures=figures,
    goals=GOALS,
)
add_arguments = MEASUREMENT.add_arguments
