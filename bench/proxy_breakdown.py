"""Where a relayed request's CPU time goes: our proxy's and the bare relay's, sampled while they serve a closed loop.

Both run as programs under `bench/proxy_sampled.py` in front of one simulated stage. A sample counts for the innermost
file of its stack that a part below knows; what only the event loop's own C code did counts for the loop. Shares come
from samples, microseconds from shares of the process's CPU time per request, which the sampling itself makes larger.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.load_process import Generator, Load
from bench.processes import cpu_seconds
from bench.proxy_part import Found, Options, Part
from bench.proxy_rivals import running
from bench.proxy_speed import AT_ONCE, simulated, text_body
from deploy.placement_table import table
from deploy.ports import free_ports

PARTS_OF: tuple[tuple[str, str], ...] = (
    ("server: uvicorn", r"/uvicorn/"),
    ("client: aiohttp", r"/(aiohttp|yarl|multidict)/"),
    ("routes: FastAPI, Starlette", r"/(fastapi|starlette)/"),
    ("metrics", r"/prometheus_client/|/proxy/metrics\.py"),
    ("relay: JSON", r"/proxy/strict_json\.py|/json/"),
    ("relay: HTTP to stages, events", r"/proxy/(stages/(client|sse)|generate/relay|request/client_sink)\.py"),
    ("exchange, admission", r"/proxy/(http/|admission/|tenants/|pipeline\.py|request/explanation\.py)"),
    ("request: parse, bodies", r"/proxy/(request/|fields/|media/|stages/(bodies|job|cost)|generate/delivery)"),
    ("routing: table, policies", r"/proxy/(registry/|routing/|generate/router|encode/(assignment|learnt_speeds))"),
    ("attempts", r"/proxy/(generate|stages)/"),
    ("proxy: the rest", r"/proxy/|/epd_serve/"),
    ("the bare relay's own", r"/bench/proxy_relay\.py"),
    ("event loop, tasks, timers", r"/asyncio/|/uvloop/"),
)
REST = "other"


def measure(options: Options) -> Found:
    seconds = 3.0 if options.quick else 12.0
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp")))
        generator = stack.enter_context(Generator())
        launch = stack.enter_context(simulated("PD"))
        stage = launch.stage_url("PD")
        assert stage is not None, "the layout has a PD"
        for kind in ("whole", "stream"):
            load = Load([text_body(launch.model, stream=kind == "stream")], seconds, at_once=AT_ONCE)
            for name, argv in _programs(stage, launch.model, scratch):
                spent, stacks = _sampled(name, argv, scratch / f"{kind} {name}.jsonl", generator, load)
                rows += [
                    {"kind": kind, "to": name, "part": part, "share": round(share, 4), "us": round(share * spent, 1)}
                    for part, share in shares(stacks).items()
                ]
    text = _table(rows)
    return Found({}, [{**row, "of": row["part"]} for row in rows], text)


PART = Part("breakdown", "where a request's CPU time goes in our proxy and in the bare relay", measure)


def part_of(stack: Sequence[str]) -> str:
    """The part that a stack of file names (innermost first) counts for."""
    for file in stack:
        for part, pattern in PARTS_OF:
            if re.search(pattern, file) and "importlib" not in file:
                return part
    return REST


def shares(stacks: Sequence[tuple[Sequence[str], int]]) -> dict[str, float]:
    """Share of the samples by part, the largest first."""
    counts: Counter[str] = Counter()
    for stack, count in stacks:
        counts[part_of(stack)] += count
    total = max(counts.total(), 1)
    return {part: count / total for part, count in counts.most_common()}


def _programs(stage: str, model: str, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and arguments of what is sampled, a port still to follow where `{port}` stands."""
    stages = scratch / "stages.yaml"
    stages.write_text(yaml.safe_dump({"model": model, "stages": [{"id": "PD0", "role": "PD", "url": stage}]}))
    yield "proxy", ["deploy.cli", "proxy", "--stages", str(stages), "--port", "{port}"]
    yield "relay", ["bench.proxy_relay", "{port}", stage]


def _sampled(
    name: str, argv: Sequence[str], out: Path, generator: Generator, load: Load
) -> tuple[float, list[tuple[list[str], int]]]:
    """(CPU microseconds per request, stacks with their counts) of one program under load."""
    (port,) = free_ports(1)
    words = [word.format(port=port) for word in argv]
    with running(name, port, [sys.executable, "-m", "bench.proxy_sampled", str(out), *words]) as program:
        time.sleep(1.0)  # the proxy asks its stage's health once a second
        generator.run(program.url, Load(load.bodies, 1.0, at_once=load.at_once))
        os.kill(program.pid, signal.SIGUSR1)
        before = cpu_seconds({"it": (program.pid,)})["it"]
        found = generator.run(program.url, Load(load.bodies, load.seconds, at_once=load.at_once, warm_up_s=0.0))
        spent_s = cpu_seconds({"it": (program.pid,)})["it"] - before
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line]
    return spent_s / found["requests"] * 1e6, [(line["stack"], line["count"]) for line in lines]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys((row["kind"], row["to"]) for row in rows))
    parts = list(dict.fromkeys(row["part"] for row in rows))
    us = {(row["kind"], row["to"], row["part"]): row["us"] for row in rows}
    lines: list[tuple[str, ...]] = [("CPU us/request", *(f"{to}, {kind}" for kind, to in columns))]
    lines += [(part, *(f"{us.get((*column, part), 0.0):.0f}" for column in columns)) for part in parts]
    sums = (sum(value for key, value in us.items() if key[:2] == column) for column in columns)
    return table([*lines, ("sum", *(f"{total:.0f}" for total in sums))])
