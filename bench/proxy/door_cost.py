"""What admission takes of the proxy's time for a request that nobody keeps waiting, in process.

Each request passes the whole of it: it is let in, sized, given its turn, counted at an instance, and leaves. `decided`:
by credits of four P and four D that report, and in the order of deadlines. `undecided`: whoever comes has room, in
order of arrival. The difference is what the decisions cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Literal

from bench.micro.measurement import Row
from epd_serve.errors import StageError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.admission.gate import Gate, Pass
from proxy.admission.queue import Kind, Stage
from proxy.config.limits import AdmissionLimits
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.metrics import Metrics
from proxy.records.record import Record
from proxy.registry.table import InstanceTable
from proxy.routing.credits import Need

ROLES = (Role.P,) * 4 + (Role.D,) * 4
NEED = Need(500.0)
SLO_S = 2.0
REQUESTS, ROUNDS = 2000, 8


def costs(rounds: int = ROUNDS, requests: int = REQUESTS) -> Iterator[Row]:
    """A row of each: microseconds of the quickest round, which nothing interrupted."""

    async def measured() -> list[Row]:
        gates = {"decided": _gate("deadline"), "undecided": _gate("fcfs")}
        gates["undecided"].queue.rooms = lambda stage, need, enough: enough
        took_us: dict[str, list[float]] = {what: [] for what in gates}
        for _ in range(rounds + 1):  # in turns; the first warms up
            for what, gate in gates.items():
                begun = time.perf_counter()
                for _ in range(requests):
                    _pass(gate)
                took_us[what].append((time.perf_counter() - begun) / requests * 1e6)
        return [{"what": what, "us": round(min(took[1:]), 2)} for what, took in took_us.items()]

    yield from asyncio.run(measured())


def _gate(order: Literal["deadline", "fcfs"]) -> Gate:
    table = InstanceTable()
    for number, role in enumerate(ROLES):
        table.apply(Instance(f"{role}{number}", role, "http://127.0.0.1:1", "life"))
        rate = 1e6 if role is Role.P else 0.0
        table.report(
            StageReport(f"{role}{number}", "life", 1, max_running=1000, prompt_tokens_per_s=rate, kv_tokens=10**9)
        )
    identity = ModelIdentity("m", "revision", "bfloat16")
    settings = ProxySettings(served_models=("m",), identity=identity, admission=AdmissionLimits(order=order))
    return Gate(settings, table, Metrics())


def _pass(gate: Gate) -> None:
    queue = gate.queue
    one = Pass(queue, Kind.TEXT, "tenant", 1.0, queue.now(), SLO_S, gate=gate, record=Record("chat"))
    with one:
        one.sized(NEED)
        if not one.goes_at_once(Stage.SERVE):
            raise StageError("an idle deployment has no room", stage="P")
        one.leased(Stage.SERVE)
        _ = one.stage_priority
        one.prefilled()
