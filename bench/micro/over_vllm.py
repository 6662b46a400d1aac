"""Ours over plain vLLM on the same cores, one server at a time, in turns. Parts of `epd-bench latency`.

    tp1      TP1 as shipped: time to first token and, end to end, time per token, one request and eight at once
    epd      (E-P)-D, one request at a time: a new image, the same again, text
    bench    the same of a new image of 640 x 640 and the `bench` preset, whose vision tower and prefill take long

Plain vLLM's busy loop can starve its own front end where it has all cores: then whole answers arrive at once, and
neither time means anything. Such a start is marked and left out; of its thread settings the best one counts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.micro.measurement import Row, in_turns
from bench.micro.rows import grouped, median, ratios
from bench.real_stages import PRESET, closed_loop
from bench.served import scratch, served
from bench.sweep.experiment import Deployment, ServedBy
from bench.sweep.running import plain_vllm
from bench.workloads.synthetic import image_body, text_body
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.demo.presets import write_preset

LAYOUT, MONOLITH = "(E-P)-D", "TP1"
OURS = "ours, as shipped"
NEW, REPEATED, TEXT = "new image", "repeated image", "text"
AT_ONCE = (1, 8)
SIDE, ANSWER_TOKENS, EPD_TOKENS = 224, 24, 64
BENCH_SIDE, BENCH_TOKENS, BENCH_REQUESTS = 640, 8, 3
WARM_UP = 3
STARVED_SHARE = 0.5
"""An answer that comes in fewer reads than this share of its tokens came at once."""

Server = Callable[[], AbstractContextManager[tuple[str, str]]]
"""A server to be started: (url, model's name) while its context lasts."""


def tp1(arguments: argparse.Namespace) -> Iterator[Row]:
    """Requests for images that are all new, as many at once as `AT_ONCE` says."""
    for turn, name, (url, model) in _in_turns(arguments, MONOLITH):
        with SenderProcess() as sender:
            seeds = itertools.count(turn << 16)
            for at_once in AT_ONCE:
                for count in (2 * at_once, arguments.requests * at_once):  # warm-up first
                    bodies = [_image(model, next(seeds), ANSWER_TOKENS) for _ in range(count)]
                    records = closed_loop(sender, url, bodies, at_once, decode=True)
                yield {"part": "tp1", "what": name, "round": turn, "at_once": at_once, **times(records)}


def epd(arguments: argparse.Namespace) -> Iterator[Row]:
    """One request at a time, each kind in turn."""
    for turn, name, (url, model) in _in_turns(arguments, LAYOUT):
        bodies: list[dict[str, Any]] = []
        for seed in range(turn << 16, (turn << 16) + WARM_UP + arguments.requests):
            image = _image(model, seed, EPD_TOKENS)
            bodies += [image, image, _text(model, seed)]
        with SenderProcess() as sender:
            records = closed_loop(sender, url, bodies, 1, decode=True)[3 * WARM_UP :]
        for place, kind in enumerate((NEW, REPEATED, TEXT)):
            yield {"part": "epd", "what": name, "round": turn, "kind": kind, **times(records[place::3])}


def bench(arguments: argparse.Namespace) -> Iterator[Row]:
    """One new image at a time."""
    with scratch() as folder:
        if arguments.engine == "vllm":
            write_preset(folder / PRESET, PRESET)
        for turn, name, (url, model) in _in_turns(arguments, LAYOUT, str(folder / PRESET)):
            seeds = range(turn << 16, (turn << 16) + 1 + BENCH_REQUESTS)
            bodies = [_image(model, seed, BENCH_TOKENS, BENCH_SIDE) for seed in seeds]
            with SenderProcess() as sender:
                records = closed_loop(sender, url, bodies, 1, decode=True)[1:]
            yield {"part": "bench", "what": name, "round": turn, **times(records)}


PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[Row]]] = MappingProxyType(
    {"tp1": tp1, "epd": epd, "bench": bench}
)


def _in_turns(
    arguments: argparse.Namespace, layout: str, model: str = ""
) -> Iterator[tuple[int, str, tuple[str, str]]]:
    """(round, server's name, (url, model's name)) while that server is up, alone on the machine."""
    real = arguments.engine == "vllm"
    flags = [model] if real and model else ["--engine", arguments.engine]
    servers = {OURS: _ours(layout, flags), **_plain(arguments.engine, model if real else "")}
    for turn, (name, server) in in_turns([*servers.items()], arguments.rounds):
        with server() as up:
            yield turn, name, up


def _ours(layout: str, flags: Sequence[str]) -> Server:
    @contextmanager
    def up() -> Iterator[tuple[str, str]]:
        with served(layout, flags, traced=False) as launch:
            yield launch.url, launch.model

    return up


def _plain(engine: str, model: str) -> dict[str, Server]:
    """Plain vLLM on all cores, its compute threads on one of them or on all."""
    blueprint = draw(DeployConfig(layout=MONOLITH, device="cpu", engine=engine, model=model))
    cores = blueprint.cores_of(blueprint.plans[0])
    deployment = Deployment("plain vLLM", MONOLITH, 1, ServedBy.VLLM)

    @contextmanager
    def up(bound: str) -> Iterator[tuple[str, str]]:
        with plain_vllm(deployment, blueprint, {"VLLM_CPU_OMP_THREADS_BIND": bound}) as running:
            yield str(running.target.servers[0].endpoint), running.model

    bounds = [",".join(map(str, cores[:count])) for count in sorted({1, len(cores)})]
    return {f"plain vLLM, threads on cores {bound}": lambda bound=bound: up(bound) for bound in bounds}  # type: ignore[misc]


def _image(model: str, seed: int, tokens: int, side: int = SIDE) -> dict[str, Any]:
    """A request for an image that no other seed gives, with an answer of so many tokens for all."""
    return {**image_body(model, side=side, answer=tokens, stream=True, seed=seed), "ignore_eos": True}


def _text(model: str, seed: int) -> dict[str, Any]:
    return {**text_body(model, tokens=32, answer=EPD_TOKENS, stream=True, seed=seed), "ignore_eos": True}


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
    for figure, name in (("tp1_ttft_over_vllm", "ttft_ms"), ("tp1_tpot_over_vllm", "token_ms")):
        found[figure] = _worst(grouped(parts.get("tp1", ()), "at_once").values(), name)
    kinds = {kind: own for (kind,), own in grouped(parts.get("epd", ()), "kind").items()}
    for figure, kind in (("new", NEW), ("repeat", REPEATED), ("text", TEXT)):
        found[f"epd_ttft_{figure}_over_vllm"] = _worst([kinds[kind]] if kind in kinds else [], "ttft_ms")
    found["epd_token_over_vllm"] = _worst(kinds.values(), "token_ms")
    found["bench_ttft_over_vllm"] = _worst([parts["bench"]] if "bench" in parts else [], "ttft_ms")
    return {name: value for name, value in found.items() if value is not None}


def _worst(kinds: Iterable[Sequence[Row]], name: str) -> float | None:
    over = [over_plain(own, name) for own in kinds]
    known = [value for value in over if value is not None]
    return max(known) if known and len(known) == len(over) else None


def over_plain(rows: Sequence[Row], name: str) -> float | None:
    """Ours over the best of plain vLLM's settings, round by round; None where none served without starving."""
    by_server = {what: own for (what,), own in grouped(rows, "what").items()}
    ours = by_server.pop(OURS)
    fed = [own for every in by_server.values() if (own := [row for row in every if not row["starved"]])]
    ratio = ratios(ours, min(fed, key=lambda own: median(own, "token_ms")), name) if fed else None
    return ratio.median if ratio is not None else None


def table_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """A row per server and kind of load: medians over rounds."""
    for own in grouped(({"kind": f"{row.get('at_once', 1)} at once", **row} for row in rows), "what", "kind").values():
        starved = f"{sum(row['starved'] for row in own)} of {len(own)}"
        yield {**own[0], **{name: median(own, name) for name in ("ttft_ms", "token_ms")}, "starved": starved}
