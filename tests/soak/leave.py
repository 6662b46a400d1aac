"""`python -m tests.soak.leave`: how soon every stage is let go of when clients leave, whatever the stage.

While their image is encoded, their prompt prefilled, their answer decoded. Clients, all at once or one alone, send a
request each; when the stages hold all of them the clients close their connections, and each stage notes when its own is
lost, which is what makes vLLM abort. Clients and stages share one process, the proxy is another.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.clients.http import Connection, connect, post
from bench.micro.measurement import Goal
from bench.proxy.rivals import image_request, running, text_request
from bench.statistic import percentile
from deploy.host.ports import free_ports
from deploy.memory.placement_table import table
from epd_serve.errors import StageError
from epd_serve.roles import Role
from tests.soak.harness import Result, Soak
from tests.soak.holding_stages import HoldingStages

MODEL = "bench"
CLIENTS = (1, 50)
LIMIT_S = 30.0
LOOK_S = 0.001
IMAGE_SIDE = 16


class Phase(NamedTuple):
    """Where clients leave. `holds`: connections to stages that each request has then."""

    name: str
    image: bool
    begins: bool
    holds: int


PHASES = (Phase("encode", True, False, 1), Phase("prefill", False, False, 2), Phase("decode", False, True, 2))


def measure(arguments: argparse.Namespace) -> Result:
    rows = asyncio.run(_measure(4 if arguments.quick else 20))
    late_ms = [ms for row in rows for ms in row["ms"]]
    figures = {
        "leave_to_cancel_p50_ms": round(percentile(late_ms, 50), 3),
        "leave_to_cancel_p99_ms": round(percentile(late_ms, 99), 3),
        "leave_to_cancel_max_ms": round(max(late_ms), 3),
    }
    return figures, rows, _table(rows)


SOAK = Soak(
    "leave",
    "how soon stages are let go of when clients leave",
    measure,
    (),
    (Goal("leave_to_cancel_max_ms", "<=", 100.0, "whatever stage, one client alone or 50 at the same moment"),),
)


async def _measure(rounds: int) -> list[dict[str, Any]]:
    stages = HoldingStages()
    rows: list[dict[str, Any]] = []
    async with stages.serving(Role.E, Role.P, Role.D):
        with tempfile.TemporaryDirectory(prefix="epd-soak-", dir="/tmp") as scratch:
            (port,) = free_ports(1)
            file = Path(scratch) / "stages.yaml"
            entries = [{"id": f"{role}0", "role": role.value, "url": url} for role, url in stages.urls.items()]
            file.write_text(yaml.safe_dump({"model": MODEL, "stages": entries}), encoding="utf-8")
            argv = [sys.executable, "-m", "deploy.cli", "proxy", "--stages", str(file), "--port", str(port)]
            argv += ["--proxy", f"admission.encodes_per_instance={max(CLIENTS)}"]
            context = running("proxy", port, argv)
            proxy = await asyncio.to_thread(context.__enter__)  # the stages answer it meanwhile
            try:
                await _leave(proxy.url, stages, PHASES[-1], 1, seed=0)  # first-time imports
                for turn in range(rounds):
                    for phase in PHASES:
                        for clients in CLIENTS:
                            ms = await _leave(proxy.url, stages, phase, clients, seed=turn * 100)
                            rows.append({"phase": phase.name, "clients": clients, "round": turn, "ms": ms})
            finally:
                await asyncio.to_thread(context.__exit__, None, None, None)
    return rows


async def _leave(url: str, stages: HoldingStages, phase: Phase, clients: int, *, seed: int) -> list[float]:
    """Returns, for each connection of a stage, milliseconds from the clients' leaving to its loss."""
    stages.begins = phase.begins
    connections: list[Connection] = []
    for number in range(clients):
        request = image_request(MODEL, seed + number, IMAGE_SIDE) if phase.image else text_request(MODEL, stream=True)
        connection = await connect(url)
        connection.send(post(url, "/v1/chat/completions", bytes(request.body)))
        connections.append(connection)
    await _until(lambda: stages.held == clients * phase.holds, f"{phase.name}: the stages hold {clients} requests")
    if phase.begins:
        await _until(lambda: all(one.begun for one in connections), f"{phase.name}: {clients} answers have begun")
    stages.lost.clear()
    left_s = time.perf_counter()
    for connection in connections:
        connection.close()
    await _until(lambda: not stages.held, f"{phase.name}: the stages are let go of")
    return [round((lost_s - left_s) * 1e3, 3) for lost_s in stages.lost]


async def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise StageError(f"not within {LIMIT_S:g} s: {what}", stage="proxy")
        await asyncio.sleep(LOOK_S)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [("clients leave during", "at once", "p50 ms", "p99 ms", "max ms", "connections")]
    for phase in PHASES:
        for clients in CLIENTS:
            ms = [one for row in rows if (row["phase"], row["clients"]) == (phase.name, clients) for one in row["ms"]]
            values = (percentile(ms, 50), percentile(ms, 99), max(ms))
            lines.append((phase.name, str(clients), *(f"{value:.2f}" for value in values), str(len(ms))))
    return table(lines)


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
