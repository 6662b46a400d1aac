"""Other proxies run beside ours, and what each gets done: the same closed loops through all of them, in turns.

A rival is started from a command, waited for until it listens, and ended with the context. Ratios are taken within a
round, so that what slows the machine down slows both sides.
"""

from __future__ import annotations

import base64
import contextlib
import io
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from PIL import Image

from bench.clients.metrics import throughput
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.example_proxies import Rival, running
from bench.processes import cpu_seconds
from bench.workloads.synthetic import text_body
from deploy.placement_table import table
from deploy.ports import free_ports

CONCURRENCY = 32
ANSWER_TOKENS, PROMPT_TOKENS = 16, 19
IMAGE_SIDE = 258  # x side x 3 bytes of noise that no PNG compresses: 200 KB
WARM_UP_S = 0.5

Row = dict[str, Any]


def text_request(model: str, *, stream: bool) -> Request:
    return Request.of(text_body(model, tokens=PROMPT_TOKENS, answer=ANSWER_TOKENS, stream=stream))


def image_request(model: str, seed: int, side: int = IMAGE_SIDE) -> Request:
    """Returns a streamed request with an image of noise that no other seed gives, about side² · 3 bytes."""
    file = io.BytesIO()
    pixels = random.Random(seed).randbytes(side * side * 3)
    Image.frombytes("RGB", (side, side), pixels).save(file, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = text_body(model, tokens=PROMPT_TOKENS, answer=ANSWER_TOKENS, stream=True)
    return Request.of({**body, "messages": [{"role": "user", "content": parts}]})


@contextlib.contextmanager
def bare_relay(*stages: str) -> Iterator[Rival]:
    """`relay.py` in front of stages (URLs)."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "bench.micro.proxy.relay", str(port), *stages]
    with running("relay", port, argv) as rival:
        yield rival


def closed_loop(sender: SenderProcess, rival: Rival, requests: Sequence[Request], seconds: float) -> Row:
    """Returns what a closed loop through `rival` saw, and its CPU time per request."""
    before = cpu_seconds({"it": rival.pids})["it"]
    flow = Flow(requests, concurrency=CONCURRENCY, duration_s=WARM_UP_S + seconds)
    run = sender.run(rival.url, flow)
    spent_s = cpu_seconds({"it": rival.pids})["it"] - before
    row = throughput(run, warm_up_s=WARM_UP_S, seconds=seconds)
    return row | ({"cpu_us_per_request": round(spent_s / len(run.rows) * 1e6, 1)} if rival.pids else {})


def in_turns(rivals: Sequence[Rival], kinds: Mapping[str, Callable[[Rival], Row]], rounds: int) -> Iterator[Row]:
    """Yields `kind`, `to`, `round` and what the kind's measurement of a rival returns, rival by rival in each round."""
    for turn in range(rounds):
        for kind, measure in kinds.items():
            for rival in rivals:
                yield {"kind": kind, "to": rival.name, "round": turn, **measure(rival)}


def by_round(rows: Sequence[Row], kind: str, field: str) -> list[dict[str, float]]:
    """Returns the field's value by rival, for each round."""
    rounds: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == kind and field in row:
            rounds.setdefault(row["round"], {})[row["to"]] = row[field]
    return list(rounds.values())


def ratio(rows: Sequence[Row], kind: str, name: str, base: str, field: str = "rps") -> float:
    """Returns the median over rounds of `name`'s value over `base`'s."""
    return round(statistics.median(one[name] / one[base] for one in by_round(rows, kind, field)), 4)


def medians_table(rows: Sequence[Row], fields: Mapping[str, str]) -> str:
    """Returns a line per kind and rival: medians over rounds. `fields`: format by field."""
    lines: list[tuple[str, ...]] = [("requests", "through", *(name.replace("_", " ") for name in fields), "errors")]
    for kind, name in dict.fromkeys((row["kind"], row["to"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["to"]) == (kind, name)]
        values = ([row[field] for row in own if field in row] for field in fields)
        cells = (
            format(statistics.median(one), form) if one else ""
            for one, form in zip(values, fields.values(), strict=True)
        )
        lines.append((kind, name, *cells, str(sum(row["errors"] for row in own))))
    return table(lines)
