"""Ours over plain vLLM on the same cores, all servers up and asked in turns. Parts of `epd-bench latency`.

    tp1      TP1 as shipped: time to first token and, end to end, time per token, one request and eight at once
    core     the same with one core for all of each server
    epd      (E-P)-D, one request at a time: a new image, the same again, text
    bench    the same of a new image of 640 x 640 and the `bench` preset, whose vision tower and prefill take long

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.micro.cores import alike, confined, core_us, ratios_at_one_speed
from bench.micro.measurement import Row, in_turns
from bench.micro.rows import grouped, median
from bench.real_stages import PRESET, check_memory, closed_loop
from bench.served import scratch, served
from bench.statistic import Spread
from bench.sweep.experiment import Deployment, ServedBy
from bench.sweep.running import REST_S, plain_vllm
from bench.workloads.synthetic import image_body, text_body
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.cpu_threads import BIND_ENV
from epd_serve.demo.presets import write_preset
from proxy.config.tree import changed

LAYOUT, MONOLITH = "(E-P)-D", "TP1"
OURS = "ours, as shipped"
NEW, REPEATED, TEXT = "new image", "repeated image", "text"
AT_ONCE = (1, 8)
SIDE, ANSWER_TOKENS, EPD_TOKENS = 224, 24, 64
BENCH_SIDE, BENCH_TOKENS = 640, 8
WARM_UP = 3
ALL_TOKENS = {"ignore_eos": True, "stream_options": {"include_usage": True}}
"""As many as were asked for, and their number: not every token has text, of which the client would see it."""
STARVED_SHARE = 0.5
"""An answer that comes in fewer reads than this share of its tokens came at once."""

Server = Callable[[], AbstractContextManager[tuple[str, str]]]
"""A server to be started: (url, model's name) while its context lasts."""


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


@dataclass(frozen=True)
class Part:
    """Attributes: preset: the model is `PRESET`. cores: for each server; None: all."""

    layout: str
    asked: tuple[Asked, ...]
    preset: bool = False
    cores: int | None = None


def _images(at_once: int) -> Asked:
    def body(model: str, seed: int) -> list[dict[str, Any]]:
        return [_image(model, seed, ANSWER_TOKENS)]

    return Asked((f"{at_once} at once",), body, groups=2 * at_once + 2, at_once=at_once)


def _image_again_text(model: str, seed: int) -> list[dict[str, Any]]:
    image = _image(model, seed, EPD_TOKENS)
    return [image, image, text(model, seed)]


def _large(model: str, seed: int) -> list[dict[str, Any]]:
    return [_image(model, seed, BENCH_TOKENS, BENCH_SIDE)]


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "tp1": Part(MONOLITH, tuple(map(_images, AT_ONCE))),
        "core": Part(MONOLITH, tuple(map(_images, AT_ONCE)), cores=1),
        "epd": Part(LAYOUT, (Asked((NEW, REPEATED, TEXT), _image_again_text, 2),)),
        "bench": Part(LAYOUT, (Asked((NEW,), _large, 1),), preset=True),
    }
)


def measure(arguments: argparse.Namespace, name: str) -> Iterator[Row]:
    """A row per server, kind and turn. In each of so many rounds all servers are started anew."""
    part, real = PARTS[name], arguments.engine == "vllm"
    if real:
        check_memory(part.layout.count("-") + 1 + len(_bounds(part)))
    with scratch() as folder:
        if real and part.preset:
            write_preset(folder / PRESET, PRESET)
        model = str(folder / PRESET) if real and part.preset else ""
        for start in range(arguments.rounds):
            with ExitStack() as stack:
                sender = stack.enter_context(SenderProcess())
                with confined(_cores(part)):
                    servers = {own: stack.enter_context(up()) for own, up in _servers(arguments, part, model).items()}
                seeds = itertools.count(start << 16)
                for asked, (url, served_name) in itertools.product(part.asked, servers.values()):
                    closed_loop(sender, url, asked.of(served_name, seeds, WARM_UP * asked.at_once), asked.at_once)
                for row in _turns(sender, servers, part.asked, seeds, arguments.turns):
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


def _cores(part: Part) -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))[: part.cores]


def _bounds(part: Part) -> list[str]:
    """Of plain vLLM's compute threads: one core or all."""
    cores = _cores(part)
    return [",".join(map(str, cores[:count])) for count in sorted({1, len(cores)})]


def _servers(arguments: argparse.Namespace, part: Part, model: str) -> dict[str, Server]:
    flags = [model] if model else ["--engine", arguments.engine]
    return {OURS: _ours(part.layout, flags), **_plain(arguments.engine, model, _bounds(part))}


def _ours(layout: str, flags: Sequence[str]) -> Server:
    @contextmanager
    def up() -> Iterator[tuple[str, str]]:
        with served(layout, flags, traced=False) as launch:
            yield launch.url, launch.model

    return up


def _plain(engine: str, model: str, bounds: Sequence[str]) -> dict[str, Server]:
    """Plain vLLM on the same cores, its compute threads on those of each of `bounds`."""
    blueprint = draw(changed(DeployConfig(), {"layout": MONOLITH, "device": "cpu", "engine": engine, "model": model}))
    deployment = Deployment("plain vLLM", MONOLITH, 1, ServedBy.VLLM)

    @contextmanager
    def up(bound: str) -> Iterator[tuple[str, str]]:
        with plain_vllm(deployment, blueprint, {BIND_ENV: bound}) as running:
            yield str(running.target.servers[0].endpoint), running.model

    return {f"plain vLLM, threads on cores {bound}": lambda bound=bound: up(bound) for bound in bounds}  # type: ignore[misc]


def _image(model: str, seed: int, tokens: int, side: int = SIDE) -> dict[str, Any]:
    """A request for an image that no other seed gives, with an answer of so many tokens for all."""
    return {**image_body(model, side=side, answer=tokens, stream=True, seed=seed), **ALL_TOKENS}


def text(model: str, seed: int) -> dict[str, Any]:
    return {**text_body(model, tokens=32, answer=EPD_TOKENS, stream=True, seed=seed), **ALL_TOKENS}


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
    found: dict[str, float | None] = {}
    for part in ("tp1", "core"):
        for figure, name in (("ttft", "ttft_ms"), ("tpot", "token_ms")):
            found[f"{part}_{figure}_over_vllm"] = _worst(_by_kind(parts.get(part, ())).values(), name)
    kinds = _by_kind(parts.get("epd", ()))
    for figure, kind in (("new", NEW), ("repeat", REPEATED), ("text", TEXT)):
        found[f"epd_ttft_{figure}_over_vllm"] = _worst([kinds[kind]] if kind in kinds else [], "ttft_ms")
    found["epd_token_over_vllm"] = _worst(kinds.values(), "token_ms")
    found["bench_ttft_over_vllm"] = _worst([parts["bench"]] if "bench" in parts else [], "ttft_ms")
    return {name: value for name, value in found.items() if value is not None}


def _by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    return {kind: own for (kind,), own in grouped(rows, "kind").items()}


def _worst(kinds: Iterable[Sequence[Row]], name: str) -> float | None:
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


def table_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """A row per server and kind of load: medians over turns, and of ours the ratios."""
    for (what, kind), own in grouped(rows, "what", "kind").items():
        row = {"what": what, "kind": kind, **{name: median(own, name) for name in ("ttft_ms", "token_ms")}}
        row["even"] = f"{sum(alike(one['core_us']) for one in own)} of {len(own)}"
        row["starved"] = f"{sum(one['starved'] for one in own)} of {len(own)}"
        for name in ("ttft_ms", "token_ms"):
            over = over_plain([one for one in rows if one["kind"] == kind], name) if what == OURS else None
            row[f"{name}_over"] = "" if over is None else f"{over:.2f}"
        yield row
