"""Processes of stages killed (SIGKILL) under long streams, which go on at another one: what clients see of it, and what
it costs the relay to know what they have.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import httpx

from bench.change.deployment import Deployment, commanded
from bench.change.kills import EVERY_S, LIMIT_S, WHOLE_S, Kill, Victim, kill, stage_processes, stages
from bench.change.loads import DEMO_TEXTS, PROFILE, SIDE, judged
from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import Request, Target
from bench.micro.proxy.rivals import closed_loop, compared, ratio, text_request
from bench.served import Served, served, simulated
from bench.started import Rival
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
        bodies = list(_bodies(launch.model))
        requests = [Request.of(body, spec=_at_rest(launch, body)) for body in bodies]
        yield from _killed("streams", launch, deployment, requests, AT_ONCE, count, stage_processes, REAL_EVERY_S)


def streams_simulated(count: int) -> Iterator[dict[str, Any]]:
    """Simulated stages, 200 streams of 100 tokens at a time, through two front doors."""
    with simulated(SIMULATED, LONG_PROFILE, ["--workers", "2"]) as launch, commanded(launch) as deployment:
        bodies = [
            text_body(launch.model, tokens=64, answer=SIMULATED_TOKENS, stream=True, seed=seed) for seed in range(32)
        ]
        requests = [Request.of(body, spec=_at_rest(launch, body)) for body in bodies]
        yield from _killed(
            "streams_simulated", launch, deployment, requests, SIMULATED_AT_ONCE, count, decoding, EVERY_S
        )


def relay_costs(seconds: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Requests a second of streams that another stage could go on with, and of such that end with their stage, through
    a front door each; simulated stages, in turns."""
    with (
        simulated("PD") as keeps,
        simulated("PD", None, ["--proxy", "go_on=never"]) as leaves,
        SenderProcess() as sender,
    ):
        rivals = (
            Rival("never", leaves.url, leaves.cpu_parts["proxy"]),
            Rival("auto", keeps.url, keeps.cpu_parts["proxy"]),
        )
        loop = partial(_loop, sender, text_request(keeps.model, stream=True), seconds)
        yield from ({**row, "part": "relay"} for row in compared(rivals, {"stream": loop}, rounds))


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
        }
        named |= {"migration_first_token_s": statistics.median(firsts)}
    if relay := [dict(row) for row in rows if row["part"] == "relay"]:
        named["relay_over_before"] = ratio(relay, "stream", "auto", "never")
        if all("cpu_us_per_request" in row for row in relay):
            named["relay_cpu_over_before"] = ratio(relay, "stream", "auto", "never", "cpu_us_per_request")
    return {name: round(value, 4) for name, value in named.items()}


def _loop(sender: SenderProcess, request: Request, seconds: float, rival: Rival) -> dict[str, Any]:
    return closed_loop(sender, rival, [request], seconds)


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


def _killed(
    part: str,
    launch: Served,
    deployment: Deployment,
    requests: Sequence[Request],
    at_once: int,
    count: int,
    victims: Callable[[Mapping[str, Any]], Sequence[Victim]],
    every_s: float,
) -> Iterator[dict[str, Any]]:
    """Kill one every so often, or when all is whole again. No stream is excused."""
    kills, draw = list[Kill](), random.Random(1)
    with SenderProcess() as sender:
        seconds = count * WHOLE_S
        flow = Flow(requests, "stream", concurrency=at_once, duration_s=seconds)
        begun = time.perf_counter()
        sender.start(
            Target(launch.url, {"x-epd-explain": "1"}), flow, limit_s=seconds + LIMIT_S, decode=True, keep_text=True
        )
        while len(kills) < count:
            time.sleep(max(0.0, (kills[-1].at_s if kills else begun) + every_s - time.perf_counter()))
            deployment.whole(WHOLE_S)
            kills.append(kill(victims(deployment.status()), kills, draw))
            victim, at_s = kills[-1].victim, round(kills[-1].at_s - begun, 3)
            yield {"part": part, "kill": victim.name, "process": victim.process, "at": at_s}
        deployment.whole(WHOLE_S)
        sender.enough()
        run = sender.finish()
    yield from judged(run.rows).rows(part, run.begun_s)
    for row in run.rows:
        if (found := gap_s(row, kills)) is not None:
            yield {"part": part, "gap_s": round(found, 4)}
        elif row.ok and row.sent_s is not None and row.token_s:
            yield {"part": part, "first_s": round(row.token_s[0] - row.sent_s, 4)}


def decoding(status: Mapping[str, Any]) -> list[Victim]:
    """Stages that decode, each of a kind of its own: none is killed again before all others were."""
    return [replace(one, kind=one.name) for one in stages(status) if one.decodes]


def gap_s(row: RequestRecord, kills: Sequence[Kill]) -> float | None:
    """Between two tokens, over the end of the instance that wrote the first of them; None of a stream that was at none
    that was killed, or had ended."""
    for one in kills:
        if row.ok and row.instances.endswith(f"decode={one.victim.name}"):
            before = max((at for at in row.token_s if at <= one.gone_s), default=None)
            after = min((at for at in row.token_s if at > one.gone_s), default=None)
            if before is not None and after is not None:
                return after - before
    return None
