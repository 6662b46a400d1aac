"""Where a relayed request's CPU time goes: our proxy's and the bare relay's, sampled while they serve a closed loop.

Both run as programs under `sampled.py` in front of one simulated stage. A sample counts for the innermost file of its
stack that a part below knows; what only the event loop's own C code did counts for the loop. Shares come from samples,
microseconds from shares of the process's CPU time per request, which the sampling itself makes larger.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.example_proxies import running
from bench.micro.proxy.part import Options, Part, PartResult
from bench.micro.proxy.rivals import CONCURRENCY, closed_loop, text_request
from bench.micro.proxy.simulated import simulated
from bench.scratch import scratch
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
    ("the bare relay's own", r"/bench/micro/proxy/relay\.py"),
    ("event loop, tasks, timers", r"/asyncio/|/uvloop/"),
)
REST = "other"

Stacks = list[tuple[list[str], int]]
"""File names, innermost first, and how often they were seen."""


def measure(options: Options) -> PartResult:
    seconds = 3.0 if options.quick else 12.0
    rows: list[dict[str, Any]] = []
    with scratch() as folder, SenderProcess() as sender:
        with simulated("PD") as launch:
            stage, stages = launch.stage_url("PD"), folder / "stages.yaml"
            assert stage is not None, "the layout has a PD"
            listed = {"model": launch.model, "stages": [{"id": "PD0", "role": "PD", "url": stage}]}
            stages.write_text(yaml.safe_dump(listed), encoding="utf-8")
            programs = {
                "proxy": ["deploy.cli", "proxy", "--stages", str(stages), "--port", "{port}"],
                "relay": ["bench.micro.proxy.relay", "{port}", stage],
            }
            for kind in ("whole", "stream"):
                request = text_request(launch.model, stream=kind == "stream")
                for name, argv in programs.items():
                    spent_us, stacks = _sampled(name, argv, folder / f"{kind} {name}", sender, request, seconds)
                    rows += [
                        {
                            "kind": kind,
                            "to": name,
                            "of": part,
                            "share": round(share, 4),
                            "us": round(share * spent_us, 1),
                        }
                        for part, share in shares(stacks).items()
                    ]
    return PartResult({}, rows, _table(rows))


PART = Part("breakdown", "where a request's CPU time goes in our proxy and in the bare relay", measure)


def part_of(stack: Sequence[str]) -> str:
    """Returns the part that a stack of file names (innermost first) counts for."""
    for file in stack:
        for part, pattern in PARTS_OF:
            if re.search(pattern, file) and "importlib" not in file:
                return part
    return REST


def shares(stacks: Stacks) -> dict[str, float]:
    """Returns the share of the samples by part, the largest first."""
    counts: Counter[str] = Counter()
    for stack, count in stacks:
        counts[part_of(stack)] += count
    return {part: count / max(counts.total(), 1) for part, count in counts.most_common()}


def _sampled(
    name: str, argv: Sequence[str], out: Path, sender: SenderProcess, request: Request, seconds: float
) -> tuple[float, Stacks]:
    """Returns (CPU microseconds per request, stacks) of one program under load. `{port}` in `argv` is its port."""
    (port,) = free_ports(1)
    program = [sys.executable, "-m", "bench.micro.proxy.sampled", str(out), *(word.format(port=port) for word in argv)]
    with running(name, port, program) as rival:
        time.sleep(1.0)  # the proxy asks its stage's health once a second
        sender.run(rival.url, Flow([request], concurrency=CONCURRENCY, duration_s=1.0))
        os.kill(rival.pids[0], signal.SIGUSR1)
        spent_us = closed_loop(sender, rival, [request], seconds)["cpu_us_per_request"]
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line]
    return spent_us, [(line["stack"], line["count"]) for line in lines]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    us = {((row["to"], row["kind"]), row["of"]): row["us"] for row in rows}
    columns, parts = dict.fromkeys(column for column, _ in us), dict.fromkeys(part for _, part in us)
    lines: list[tuple[str, ...]] = [("CPU us/request", *(f"{to}, {kind}" for to, kind in columns))]
    lines += [(part, *(f"{us.get((column, part), 0.0):.0f}" for column in columns)) for part in parts]
    sums = (sum(value for key, value in us.items() if key[0] == column) for column in columns)
    return table([*lines, ("sum", *(f"{total:.0f}" for total in sums))])
