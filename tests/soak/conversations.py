"""What a later turn of a conversation costs, over simulated stages, and what routing by cached prefixes is worth.

Conversations of several turns about one to three images, sent whole in each turn as clients do, with time to think in
between. Two ways to choose instances, each in a deployment of its own: by what is cached where (`prefixes`, as usual),
and by load alone (`load`).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.clients.sender import answered
from bench.clients.target import Target
from bench.micro.measurement import Goal, Row
from bench.micro.rows import grouped
from bench.served import Served, simulated
from bench.statistic import percentile
from bench.workloads.synthetic import WORDS, image_body
from tests.soak.harness import Result, Soak

WAYS: Mapping[str, Sequence[str]] = {
    "prefixes": (),
    "load": ("--proxy", "prefix_routing=false"),
}
LAYOUT = "2E-2P-4D"
BLOCK_TOKENS = 32
BYTES_PER_TOKEN = 57_344
SIDE = 560  # 400 tokens
QUESTION_CHARACTERS, FIRST_CHARACTERS = 120, 1200
PROFILE: Mapping[str, Any] = {
    "comment": "a model of 7 billion parameters on an accelerator of 2023, in round numbers",
    "encode": {"setup_s": 0.01, "per_unit_s": 0.0001},
    "prefill": {"setup_s": 0.01, "per_unit_s": 0.00012},
    "kv": {"setup_s": 0.002, "per_unit_s": 1e-10},
    "decode_step_s": [[1, 0.01], [32, 0.016]],
    "jitter": 0.05,
    "capacity": {"block_tokens": BLOCK_TOKENS, "kv_tokens": 120_000},
    "kv_bytes_per_token": BYTES_PER_TOKEN,
}


@dataclass(frozen=True)
class Talks:
    """So many conversations, of which some go on at once. `think_s`: a client's mean pause between turns."""

    count: int
    think_s: float
    turns: int = 8
    at_once: int = 32
    answer: int = 64


LEAST_LOAD = 2.0
"""Requests of a D: of fewer it is chance which has most of them."""

SETTLE_S = 1.5
"""Reports of links and loads are up to a second old."""


def measure(arguments: argparse.Namespace) -> Result:
    talks = Talks(64, think_s=0.5) if arguments.quick else Talks(160, think_s=2.0)
    rows = [row for way in WAYS for row in measured(way, talks)]
    return figures(rows), rows, f"{talks.count} conversations of {talks.turns} turns, {talks.at_once} at once"


def measured(way: str, talks: Talks) -> Iterator[Row]:
    """A row per turn, and one of what the stages have counted."""
    with simulated(LAYOUT, PROFILE, WAYS[way]) as launch:
        before = _counted(launch)
        turns, loads = asyncio.run(_talk(launch, talks))
        time.sleep(SETTLE_S)
        now = _counted(launch)
    yield from ({"way": way, **turn} for turn in turns)
    yield {
        "way": way,
        "images": sum(1 + seed % 3 for seed in range(talks.count)),
        "imbalance_p99": percentile(loads, 99) if loads else math.nan,
        **{name: now[name] - before[name] for name in now},
    }


async def _talk(launch: Served, talks: Talks) -> tuple[list[Row], list[float]]:
    """All turns of all conversations, and how unevenly D's were loaded meanwhile: the most loaded over the mean."""
    turns: list[Row] = []
    left = iter(range(talks.count))

    async def lane(number: int) -> None:
        await asyncio.sleep(talks.think_s * talks.turns * number / talks.at_once)
        for seed in left:
            await _conversation(launch, seed, talks, turns)

    loads: list[float] = []
    watching = asyncio.create_task(_watch(launch.url, loads))
    async with asyncio.TaskGroup() as group:
        for number in range(talks.at_once):
            group.create_task(lane(number))
    watching.cancel()
    return turns, loads


async def _conversation(launch: Served, seed: int, talks: Talks, turns: list[Row]) -> None:
    """Adds a row per answer. `new_tokens`: of the prompt that neither an earlier turn's prompt nor its answer had, by
    blocks; `oracle_tokens`: of it that were in the last turn's prompt, by blocks."""
    chance, prompt, answer = random.Random(seed), 0, 0
    messages: list[dict[str, Any]] = []
    for number in range(1, talks.turns + 1):
        if number > 1:
            await asyncio.sleep(chance.expovariate(1 / talks.think_s))
        messages.append({"role": "user", "content": _question(launch.model, seed, number)})
        body = {"model": launch.model, "messages": messages, "max_tokens": talks.answer, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        record = await answered(launch.url, body)
        messages.append({"role": "assistant", "content": record.text})
        held = (prompt + answer - 1) // BLOCK_TOKENS * BLOCK_TOKENS if prompt else 0
        oracle = prompt // BLOCK_TOKENS * BLOCK_TOKENS
        assert record.prompt_tokens is not None, "usage was asked for"
        prompt, answer = record.prompt_tokens, record.output_tokens
        turn = {"number": number, "ttft_s": record.ttft_s, "tpot_s": record.tpot_s}
        turns.append({**turn, "new_tokens": prompt - held, "oracle_tokens": oracle})


def _question(model: str, seed: int, number: int) -> list[dict[str, Any]]:
    """What the user says: in the first turn with all images."""
    length = FIRST_CHARACTERS if number == 1 else QUESTION_CHARACTERS
    text = (f"{seed}/{number}: " + WORDS * (length // len(WORDS) + 1))[:length]
    images = []
    for at in range(1 + seed % 3 if number == 1 else 0):
        body = image_body(model, side=SIDE, answer=1, stream=False, seed=3 * seed + at)
        images += [part for part in body["messages"][0]["content"] if part["type"] == "image_url"]
    return [*images, {"type": "text", "text": text}]


async def _watch(url: str, loads: list[float]) -> None:
    while True:
        await asyncio.sleep(0.25)
        text = await asyncio.to_thread(_metrics, url)
        of_d: Counter[str] = Counter()
        for labels, value in samples(text, "epd_stage_in_flight"):
            if labels["role"] == "D":
                of_d[labels["instance"]] += int(value)
        if of_d and statistics.mean(of_d.values()) >= LEAST_LOAD:
            loads.append(max(of_d.values()) / statistics.mean(of_d.values()))


def _counted(launch: Served) -> dict[str, float]:
    """What stages and front doors have counted so far."""
    text = _metrics(launch.url)
    sent = sum(value for _, value in samples(text, "epd_kv_bytes_total"))
    encoded = sum(value for labels, value in samples(text, "epd_store_events_total") if labels["event"] == "encoded")
    told = [Target(url).ask("/metrics", limit_s=30.0).text for url in launch.stage_urls("P")]
    hits = sum(value for one in told for _, value in samples(one, "vllm:prefix_cache_hits_total"))
    hoped = {labels["which"]: value for labels, value in samples(text, "epd_proxy_prefix_tokens_total")}
    hints = {f"{which}_hint_tokens": hoped.get(which, 0.0) for which in ("all", "known", "prefill", "decode")}
    return {"kv_bytes": sent, "encoded": encoded, "hit_tokens": hits, **hints}


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False).text


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of each sample of that name."""
    families = text_string_to_metric_families(text)
    return [(one.labels, one.value) for family in families for one in family.samples if one.name == name]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Of each way, those of `prefixes` without its name."""
    named: dict[str, float] = {}
    for way, own in grouped(rows, "way").items():
        of = "" if way == ("prefixes",) else f"{way[0]}_"
        turns, (total,) = [row for row in own if "number" in row], [row for row in own if "images" in row]
        first = statistics.mean(row["ttft_s"] for row in turns if row["number"] == 1)
        later = statistics.mean(row["ttft_s"] for row in turns if row["number"] > 1)
        named |= {
            f"{of}first_turn_ttft_s": first,
            f"{of}later_turn_ttft_s": later,
            f"{of}later_turn_ttft_ratio": later / first,
            f"{of}tpot_s": statistics.mean(row["tpot_s"] for row in turns),
            f"{of}encodes_per_image": total["encoded"] / total["images"],
            f"{of}kv_sent_over_new": total["kv_bytes"] / BYTES_PER_TOKEN / sum(row["new_tokens"] for row in turns),
            f"{of}hits_over_oracle": total["hit_tokens"] / sum(row["oracle_tokens"] for row in turns),
            f"{of}imbalance_p99": total["imbalance_p99"],
        }
    if "load_imbalance_p99" in named and "imbalance_p99" in named:
        named["imbalance_over_load"] = named["imbalance_p99"] / named["load_imbalance_p99"]
    return {name: round(value, 4) for name, value in named.items()}


SOAK = Soak(
    "conversations",
    "what later turns cost, by how instances are chosen: by what is cached where, and by load alone",
    measure,
    (Goal("encodes_per_image", "==", 1.0, "an image is encoded once"),),
    speed_goals=(
        Goal("later_turn_ttft_ratio", "<=", 0.5, "a turn costs what is new in it"),
        Goal("kv_sent_over_new", "<=", 1.2, "P sends what D lacks"),
        Goal("hits_over_oracle", ">=", 0.9, "of one cache that had everything"),
        Goal("imbalance_over_load", "<=", 1.3, "no hot spots"),
    ),
)


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
