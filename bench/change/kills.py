"""Parts of a deployment killed (SIGKILL) under load, in random order: stages, front doors, controller, agent."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.change.deployment import Deployment, commanded
from bench.change.loads import PROFILE, demo_flows, judged, simulated_flows
from bench.clients.answers import CUT, ERROR_EVENT
from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.served import Served, groups, served, simulated
from deploy.host.processes import stat

REAL, SIMULATED = "E-P-2D", "2E-2P-2D"
EVERY_S = 10.0
WHOLE_S = 240.0
LIMIT_S = 180.0
GONE_S = 2.0
"""A connection of a process that was killed breaks within this."""

EMPTY_S = 20.0
LOOK_S = 0.002
KINDS = ("stage", "front", "controller", "agent")


@dataclass(frozen=True)
class Kill:
    """`at_s`, `gone_s`: of `time.perf_counter`; a process that is killed has its connections until it has gone. `what`:
    an instance's id, `front.0`, `controller` or `agent`."""

    at_s: float
    gone_s: float
    what: str

    @property
    def front(self) -> bool:
        return self.what.startswith("front")

    @property
    def decodes(self) -> bool:
        return self.what.startswith("D")


def kills_real(seconds: float, count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Real stages, the demo model; the next one once all is whole."""
    with served(REAL, ["--device", "cpu", "--workers", "2"], traced=False) as launch:
        yield from _killed("kills", launch, demo_flows(launch.model, seconds), seconds, count, seed, decode=True)


def kills_simulated(seconds: float, per_s: float, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Simulated stages, two of each role, one every ten seconds."""
    with simulated(SIMULATED, PROFILE, ["--workers", "2"]) as launch:
        flows = simulated_flows(launch.model, seconds, per_s)
        yield from _killed("kills_simulated", launch, flows, seconds, int(seconds / EVERY_S) - 1, seed)


def _killed(
    part: str, launch: Served, flows: Sequence[Any], seconds: float, count: int, seed: int, *, decode: bool = False
) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    with commanded(launch) as deployment, SenderProcess() as sender:
        begun, kills = time.perf_counter(), list[Kill]()
        sender.start(launch.url, *flows, limit_s=LIMIT_S, decode=True, keep_text=decode)
        while len(kills) < count:
            time.sleep(max(0.0, (kills[-1].at_s if kills else begun) + EVERY_S - time.perf_counter()))
            deployment.whole(WHOLE_S)
            if time.perf_counter() > begun + seconds - EVERY_S:  # the load ends, and notices nothing any more
                break
            kills.append(kill(deployment, launch, draw))
            yield {"part": part, "kill": kills[-1].what, "at": round(kills[-1].at_s - begun, 3)}
        deployment.whole(WHOLE_S)
        sender.enough()
        run = sender.finish()
        yield {"part": part, "held": deployment.emptied(EMPTY_S)}
    found = judged(run.rows, excused=lambda record: excused(record, kills))
    yield from found.rows(part, run.begun_s)


def kill(deployment: Deployment, launch: Served, draw: random.Random) -> Kill:
    """Kills one of a kind that is drawn."""
    found = pids(launch, deployment.status())
    kind = draw.choice(KINDS)
    name = draw.choice(sorted(one for one in found if kind_of(one) == kind))
    at_s = time.perf_counter()
    if kind == "stage":
        os.killpg(found[name], signal.SIGKILL)
    else:
        os.kill(found[name], signal.SIGKILL)
    until_s = at_s + GONE_S
    while stat(found[name]) is not None and time.perf_counter() < until_s:
        time.sleep(LOOK_S)
    return Kill(at_s, time.perf_counter(), name)


def kind_of(name: str) -> str:
    """Of what can be killed; "" of what is left alone."""
    if name in ("controller", "agent"):
        return name
    return "front" if name.startswith("front.") else "stage" if name[0].isupper() else ""


def pids(launch: Served, status: Mapping[str, Any]) -> dict[str, int]:
    """Of all that has a process: stages (their process groups), front doors and the other parts."""
    parts = {name: one["pid"] for name, one in status["parts"].items() if one["pid"] is not None}
    stages = {one["id"] for one in status["instances"]}
    return {**{name: pid for name, pid in groups(launch.run.parent).items() if name in stages}, **parts}


def excused(record: RequestRecord, kills: Sequence[Kill]) -> bool:
    """Whether it was on a front door that was killed, or a stream of a decode instance that was."""
    if record.sent_s is None:
        return False
    for one in kills:
        ends = one.at_s <= record.ended_s <= one.at_s + GONE_S
        if one.front and record.sent_s <= one.gone_s and ends and record.fault in ("broken", CUT):
            return True
        begun = record.first_byte_s is not None and record.first_byte_s <= one.at_s + GONE_S
        if one.decodes and begun and record.fault in (CUT, ERROR_EVENT):
            return True
    return False
