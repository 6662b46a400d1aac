"""How soon every stage is let go of when clients leave: while their picture is encoded, their prompt prefilled, their
answer decoded.

Clients, all at once or one alone, send a request each; when the stages hold all of them the clients close their
connections, and each stage notes when its own is lost, which is what makes vLLM abort. Clients and stages share one
process, the proxy is another.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.client.connection import Connection, connect, post
from bench.goals import Goal
from bench.holding_stages import HoldingStages
from bench.proxy_part import Found, Options, Part
from bench.proxy_rivals import running
from bench.proxy_speed import picture_body, text_body
from bench.statistic import percentile
from deploy.placement_table import table
from deploy.ports import free_ports
from epd_serve.errors import StageError
from epd_serve.roles import Role
from proxy.strict_json import encode

MODEL = "bench"
AT_ONCE = (1, 50)
LIMIT_S = 30.0
LOOK_S = 0.001
PICTURE_SIDE = 16


@dataclass(frozen=True)
class Phase:
    """Where clients leave. `holds`: connections to stages that each request has then."""

    name: str
    pictures: bool
    begins: bool
    holds: int


PHASES = (
    Phase("encode", pictures=True, begins=False, holds=1),
    Phase("prefill", pictures=False, begins=False, holds=2),
    Phase("decode", pictures=False, begins=True, holds=2),
)


def measure(options: Options) -> Found:
    rounds = 4 if options.quick else 20
    rows = asyncio.run(_measure(rounds))
    late = [ms for row in rows for ms in row["ms"]]
    figures = {
        "leave_to_cancel_p50_ms": round(percentile(late, 50), 3),
        "leave_to_cancel_p99_ms": round(percentile(late, 99), 3),
        "leave_to_cancel_max_ms": round(max(late), 3),
    }
    return Found(figures, rows, _table(rows))


PART = Part(
    "leave",
    "how soon stages are let go of when clients leave",
    measure,
    (Goal("leave_to_cancel_max_ms", "<=", 100.0, "whatever stage, one client alone or 50 at the same moment"),),
)


async def _measure(rounds: int) -> list[dict[str, Any]]:
    stages = HoldingStages()
    rows: list[dict[str, Any]] = []
    async with stages.serving(Role.E, Role.P, Role.D):
        with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
            (port,) = free_ports(1)
            file = Path(scratch) / "stages.yaml"
            entries = [{"id": f"{role}0", "role": role.value, "url": url} for role, url in stages.urls.items()]
            file.write_text(yaml.safe_dump({"model": MODEL, "stages": entries}), encoding="utf-8")
            argv = [sys.executable, "-m", "deploy.cli", "proxy", "--stages", str(file), "--port", str(port)]
            argv += ["--proxy", f"admission.encodes_per_instance={max(AT_ONCE)}"]
            context = running("proxy", port, argv)
            proxy = await asyncio.to_thread(context.__enter__)  # the stages answer it meanwhile
            try:
                await _leave(proxy.url, stages, PHASES[-1], 1, seed=0)  # first-time imports
                for turn in range(rounds):
                    for phase in PHASES:
                        for clients in AT_ONCE:
                            ms = await _leave(proxy.url, stages, phase, clients, seed=turn * 100)
                            rows.append({"phase": phase.name, "clients": clients, "round": turn, "ms": ms})
            finally:
                await asyncio.to_thread(context.__exit__, None, None, None)
    return rows


async def _leave(url: str, stages: HoldingStages, phase: Phase, clients: int, *, seed: int) -> list[float]:
    """For each connection of a stage, milliseconds from the clients' leaving to its loss."""
    stages.begins = phase.begins
    connections: list[Connection] = []
    for number in range(clients):
        if phase.pictures:
            body = picture_body(MODEL, seed + number, PICTURE_SIDE)
        else:
            body = text_body(MODEL, stream=True)
        connection = await connect(url)
        connection.ask(post(url, "/v1/chat/completions", encode(body)))
        connections.append(connection)
    await _until(lambda: stages.held == clients * phase.holds, f"{phase.name}: the stages hold {clients} requests")
    if phase.begins:
        await _until(lambda: all(one.begun for one in connections), f"{phase.name}: {clients} answers have begun")
    stages.lost.clear()
    left = time.perf_counter()
    for connection in connections:
        connection.close()
    await _until(lambda: not stages.held, f"{phase.name}: the stages are let go of")
    return [round((lost - left) * 1e3, 3) for lost in stages.lost]


async def _until(condition: Any, what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise StageError(f"not within {LIMIT_S:g} s: {what}", stage="proxy")
        await asyncio.sleep(LOOK_S)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [("clients leave during", "at once", "p50 ms", "p99 ms", "max ms", "connections")]
    for phase in PHASES:
        for clients in AT_ONCE:
            ms = [one for row in rows if (row["phase"], row["clients"]) == (phase.name, clients) for one in row["ms"]]
            found = [f"{value:.2f}" for value in (percentile(ms, 50), percentile(ms, 99), max(ms))]
            lines.append((phase.name, str(clients), *found, str(len(ms))))
    return table(lines)
