"""Ours over plain vLLM on the same cores, all servers up and asked in turns. Parts of `epd-bench latency`.

    tp1      TP1 as shipped: time to first token and, end to end, time per token, one request and eight at once
    epd      (E-P)-D, one request at a time: a new image, the same again, text

A turn is a few requests to one server, after a rest: plain vLLM's worker looks for its next step for a second after the
last, on a core. Before and after it the speed of each core is read (`bench/micro/cores.py`). A ratio is of two turns of
one round, and where enough rounds met cores of one speed throughout, only those count.

Plain vLLM's busy loop can starve its own front end where it has all cores: then whole answers arrive at once, and
neither time means anything. Such a turn is marked and left out; of its thread settings the best one counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from bench.micro.cores import core_us, ratios_at_one_speed
from bench.micro.measurement import Row, in_turns
from bench.micro.rows import grouped, median
from bench.served import check_memory, served
from bench.statistic import Spread
from bench.sweep.experiment import Deployment, ServedBy
from bench.sweep.running import REST_S, plain_vllm
from bench.workloads.synthetic import image_body, text_body
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.cpu_threads import BIND_ENV
from epd_serve.errors import StageError
from proxy.config.tree import changed

LAYOUT, MONOLITH = "(E-P)-D", "TP1"
OURS = "ours, as shipped"
NEW, REPEATED, TEXT = "new image", "repeated image", "text"
SIDE, ANSWER_TOKENS, EPD_TOKENS = 224, 24, 64
WARM_UP = 3
LIMIT_S = 300.0
"""Of one request, and of a turn."""
ALL_TOKENS = {"ignore_eos": True, "stream_options": {"include_usage": True}}
"""As many as were asked for, and their number: not every token has text, of which the client would see it."""
STARVED_SHARE = 0.5
"""An answer that comes in fewer reads than this share of its tokens came at once."""


@dataclass(frozen=True)
class Asked:
    """What a server is asked in a turn.

    Attributes:
        kinds: of the requests of a group, in their order. bodies: a group's, by model and seed.
        groups: in a turn. at_once: requests under way.
    """

    kinds: tuple[str, ...]
    bodies: Callable[[str, int], Sequence[Mapping[str, Any]]]
    groups: int
    at_once: int = 1

    def of(self, model: str, seeds: Iterator[int], groups: int) -> list[Mapping[str, Any]]:
        return [body for _ in range(groups) for body in self.bodies(model, next(seeds))]


def _images(at_once: int) -> Asked:
    def body(model: str, seed: int) -> list[dict[str, Any]]:
        return [_image(model, seed, ANSWER_TOKENS)]

    return Asked((f"{at_once} at once",), body, groups=2 * at_once + 2, at_once=at_once)


def _image_again_text(model: str, seed: int) -> list[dict[str, Any]]:
    image = _image(model, seed, EPD_TOKENS)
    text = text_body(model, tokens=32, answer=EPD_TOKENS, stream=True, seed=seed)
    return [image, image, {**text, **ALL_TOKENS}]


PARTS: Mapping[str, tuple[str, Sequence[Asked]]] = {
    "tp1": (MONOLITH, [_images(at_once) for at_once in (1, 8)]),
    "epd": (LAYOUT, [Asked((NEW, REPEATED, TEXT), _image_again_text, 2)]),
}
"""Of each the layout, and what is asked of it."""


def measure(arguments: argparse.Namespace, name: str) -> Iterator[Row]:
    """A row per server, kind and turn. In each of so many rounds all servers are started anew."""
    layout, loads = PARTS[name]
    cores = sorted(os.sched_getaffinity(0))
    bounds = [",".join(map(str, cores[:count])) for count in sorted({1, len(cores)})]
    if arguments.engine == "vllm":
        check_memory(layout.count("-") + 1 + len(bounds))
    for start in range(arguments.rounds):
        with ExitStack() as stack:
            sender = stack.enter_context(SenderProcess())
            ours = stack.enter_context(served(layout, ["--engine", arguments.engine], traced=False))
            servers = {OURS: (ours.url, ours.model)}
            servers |= {f"plain vLLM on {bound}": _plain(stack, arguments.engine, bound) for bound in bounds}
            seeds = itertools.count(start << 16)
            for asked, (url, model) in itertools.product(loads, servers.values()):
                closed_loop(sender, url, asked.of(model, seeds, WARM_UP * asked.at_once), asked.at_once)
            for row in _turns(sender, servers, loads, seeds, arguments.turns):
                yield {"part": name, **row, "round": start * arguments.turns + row["round"]}


def _turns(
    sender: SenderProcess,
    servers: Mapping[str, tuple[str, str]],
    asked: Sequence[Asked],
    seeds: Iterator[int],
    turns: int,
) -> Iterator[Row]:
    """What is compared comes close together: all servers with one load, then all with the next."""
    for one in asked:
        for turn, (name, (url, model)) in in_turns([*servers.items()], turns):
            time.sleep(REST_S)
            before = core_us()
            records = closed_loop(sender, url, one.of(model, seeds, one.groups), one.at_once, decode=True)
            cores = [*before, *core_us()]
            for place, kind in enumerate(one.kinds):
                own = times(records[place :: len(one.kinds)])
                yield {"what": name, "round": turn, "kind": kind, **own, "core_us": cores}


def _plain(stack: ExitStack, engine: str, bound: str) -> tuple[str, str]:
    """Plain vLLM, its compute threads on the cores of `bound`: its URL, and the model's name."""
    blueprint = draw(changed(DeployConfig(), {"layout": MONOLITH, "device": "cpu", "engine": engine}))
    deployment = Deployment("plain vLLM", MONOLITH, 1, ServedBy.VLLM)
    running = stack.enter_context(plain_vllm(deployment, blueprint, {BIND_ENV: bound}))
    return str(running.target.servers[0].endpoint), running.model


def _image(model: str, seed: int, tokens: int) -> dict[str, Any]:
    """A request for an image that no other seed gives, with an answer of so many tokens for all."""
    return {**image_body(model, side=SIDE, answer=tokens, stream=True, seed=seed), **ALL_TOKENS}


def closed_loop(
    sender: SenderProcess, url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int, *, decode: bool = False
) -> list[RequestRecord]:
    """Send all bodies, so many at a time; their records, with the time of every token where they are to be decoded.

    Raises:
        StageError: an answer was not whole: fewer requests are another measurement.
    """
    flow = Flow(requests(bodies), concurrency=concurrency, count=len(bodies))
    records = sender.run(url, flow, within_s=LIMIT_S, limit_s=LIMIT_S, decode=decode).rows
    if bad := [one for one in records if not one.ok]:
        first = f"{bad[0].fault}: {bad[0].error}"
        raise StageError(f"{url}: {len(bad)} of {len(records)} answers are not good, the first: {first}", stage=url)
    return records


def times(records: Sequence[RequestRecord]) -> Row:
    """Medians over requests, milliseconds."""
    ttft_s = [one.ttft_s for one in records if one.ttft_s is not None]
    reads = [len(set(one.token_s)) / len(one.token_s) for one in records]
    return {
        "ttft_ms": round(float(np.median(ttft_s)) * 1e3, 3),
        "token_ms": round(float(np.median([one.e2e_s / one.output_tokens for one in records])) * 1e3, 3),
        "starved": bool(np.median(reads) < STARVED_SHARE),
    }


def figures(parts: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Of the rows of each part; of loads, and of kinds where a figure is not of one, the worst counts."""
    loads, kinds = (list(grouped(parts.get(part, ()), "kind").values()) for part in PARTS)
    of_kind = {own[0]["kind"]: [own] for own in kinds}
    found = {
        "tp1_ttft_over_vllm": _worst(loads, "ttft_ms"),
        "tp1_tpot_over_vllm": _worst(loads, "token_ms"),
        "epd_ttft_new_over_vllm": _worst(of_kind.get(NEW, []), "ttft_ms"),
        "epd_ttft_repeat_over_vllm": _worst(of_kind.get(REPEATED, []), "ttft_ms"),
        "epd_ttft_text_over_vllm": _worst(of_kind.get(TEXT, []), "ttft_ms"),
        "epd_token_over_vllm": _worst(kinds, "token_ms"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _worst(kinds: Sequence[Sequence[Row]], name: str) -> float | None:
    over = [over_plain(own, name) for own in kinds]
    known = [value.median for value in over if value is not None]
    return max(known) if known and len(known) == len(over) else None


def over_plain(rows: Sequence[Row], name: str) -> Spread | None:
    """Ours over the best of plain vLLM's settings, round by round; None where none served without starving."""
    by_server = {what: own for (what,), own in grouped(rows, "what").items()}
    ours = by_server.pop(OURS, [])
    fed = [own for every in by_server.values() if (own := [row for row in every if not row["starved"]])]
    if not fed:
        return None
    return ratios_at_one_speed(ours, min(fed, key=lambda own: median(own, "token_ms")), name)
