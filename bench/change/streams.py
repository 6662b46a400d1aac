"""Processes of stages killed (SIGKILL) under long streams, which go on at another one: what clients see of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from bench.change.deployment import Deployment, commanded
from bench.change.kills import EVERY_S, WHOLE_S, Plan, Victim, killed, stage_processes, stages
from bench.change.loads import DEMO_TEXTS, PROFILE, SIDE
from bench.clients.sender import Flow
from bench.clients.target import Request, Target
from bench.served import Served, served, simulated
from bench.workloads.synthetic import demo_body, demo_image, text_body

REAL, SIMULATED = "2P-2D", "2P-4D"
AT_ONCE, TOKENS, REAL_EVERY_S = 60, 200, 20.0
SIMULATED_AT_ONCE, SIMULATED_TOKENS = 200, 100
IMAGES = 4
ANSWER_S = 120.0

LONG_PROFILE = {**PROFILE, "comment": "made up: streams of two seconds", "decode_step_s": [[1, 0.02], [256, 0.02]]}


def streams_real(count: int) -> Iterator[dict[str, Any]]:
    """Real stages, the demo model: 60 streams of 200 tokens at a time, each answer compared with the one at rest, while
    one process after the other is killed, of any stage, or the template."""
    with served(REAL, ["--device", "cpu"], traced=False) as launch, commanded(launch) as deployment:
        yield from _under_streams("streams", launch, deployment, _bodies(launch.model), AT_ONCE, count, stage_processes)


def streams_simulated(count: int) -> Iterator[dict[str, Any]]:
    """Simulated stages, 200 streams of 100 tokens at a time, through two front doors."""
    with simulated(SIMULATED, LONG_PROFILE, ["--workers", "2"]) as launch, commanded(launch) as deployment:
        bodies = (
            text_body(launch.model, tokens=64, answer=SIMULATED_TOKENS, stream=True, seed=seed) for seed in range(32)
        )
        part, at_once = "streams_simulated", SIMULATED_AT_ONCE
        yield from _under_streams(part, launch, deployment, bodies, at_once, count, decoding)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`kills_cut_streams` is the caller's."""
    named: dict[str, float] = {}
    gaps = [row["gap_s"] for row in rows if row["part"] == "streams" and "gap_s" in row]
    firsts = [row["first_s"] for row in rows if row["part"] == "streams" and "first_s" in row]
    if len(gaps) > 1:
        percentiles = statistics.quantiles(gaps, n=100, method="inclusive")
        named |= {
            "migrations": len(gaps),
            "migration_gap_p50_s": percentiles[49],
            "migration_gap_p99_s": percentiles[98],
            "migration_first_token_s": statistics.median(firsts),
        }
    return {name: round(value, 4) for name, value in named.items()}


def _bodies(model: str) -> Iterator[dict[str, Any]]:
    rest = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    for question in DEMO_TEXTS:
        yield {"model": model, "messages": [{"role": "user", "content": question}], **rest}
    for seed in range(IMAGES):
        yield {**demo_body(model, demo_image(seed, SIDE)), **rest}


def _at_rest(launch: Served, body: Mapping[str, Any]) -> str:
    """The whole answer with nothing else to do."""
    asked = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False}
    answer = httpx.post(f"{launch.url}/v1/chat/completions", json=asked, timeout=ANSWER_S).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def _under_streams(
    part: str,
    launch: Served,
    deployment: Deployment,
    bodies: Iterable[Mapping[str, Any]],
    at_once: int,
    count: int,
    victims: Callable[[Mapping[str, Any]], Sequence[Victim]],
) -> Iterator[dict[str, Any]]:
    """No stream is excused."""
    requests = [Request.of(body, spec=_at_rest(launch, body)) for body in bodies]
    seconds, every_s = count * WHOLE_S, EVERY_S if victims is decoding else REAL_EVERY_S
    plan = Plan(part, seconds, count, every_s, keep_text=True, excuses=False)
    flow = Flow(requests, "stream", concurrency=at_once, duration_s=seconds)
    yield from killed(plan, Target(launch.url, {"x-epd-explain": "1"}), deployment, [flow], victims)


def decoding(status: Mapping[str, Any]) -> list[Victim]:
    """Stages that decode, each of a kind of its own: none is killed again before all others were."""
    return [replace(one, kind=one.name) for one in stages(status) if one.decodes]
