"""Parts of a deployment killed (SIGKILL) under load, in random order: stages, front doors, control."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.change.deployment import Deployment, commanded
from bench.change.loads import LIMIT_S, PROFILE, at_rest, demo_flows, judged, simulated_flows
from bench.clients.answers import CUT, UNREACHABLE
from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import Target
from bench.served import served, simulated
from deploy.host.processes import running, signal_group, signal_process, stat
from epd_serve.engine.template.messages import TEMPLATE_NAME

REAL, SIMULATED = "E-P-2D", "2E-2P-2D"
EVERY_S = 10.0
WHOLE_S = 240.0
GONE_S = 2.0
"""A connection of a process that was killed breaks within this."""

EMPTY_S = 20.0
LOOK_S = 0.002


@dataclass(frozen=True)
class Victim:
    """What may be killed.

    Attributes:
        kind: of those that are drawn from alike. name: an instance's id, `front.0`, `control`, …
        pid: its process; with `group` that of its whole group.
        front: connections of clients end with it. listens: the socket that they connect to goes, too, until another is
            there. decodes: streams go on at another one.
        process: what the kernel calls it, where it is one of a group.
    """

    kind: str
    name: str
    pid: int
    group: bool = False
    front: bool = False
    listens: bool = False
    decodes: bool = False
    process: str = ""


@dataclass(frozen=True)
class Kill:
    """`at_s`, `gone_s`: of `time.perf_counter`; a process that is killed has its connections until it has gone."""

    at_s: float
    gone_s: float
    victim: Victim


def kills_real(seconds: float, count: int) -> Iterator[dict[str, Any]]:
    """Real stages, the demo model; the next one once all is whole."""
    with served(REAL, ["--device", "cpu", "--workers", "2"], traced=False) as launch, commanded(launch) as deployment:
        plan = Plan("kills", seconds, count, keep_text=True)
        yield from killed(plan, launch.url, deployment, demo_flows(launch.model, seconds), local_victims)


def kills_simulated(seconds: float, per_s: float) -> Iterator[dict[str, Any]]:
    """Simulated stages, two of each role, one every ten seconds."""
    with simulated(SIMULATED, PROFILE, ["--workers", "2"]) as launch, commanded(launch) as deployment:
        plan = Plan("kills_simulated", seconds, int(seconds / EVERY_S) - 1)
        yield from killed(plan, launch.url, deployment, simulated_flows(launch.model, seconds, per_s), local_victims)


@dataclass(frozen=True)
class Plan:
    """So many kills within so many seconds of load, one every so often or when all is whole again.

    Attributes:
        part: of the rows. keep_text: answers are judged, too. excuses: connections of a killed front door.
    """

    part: str
    seconds: float
    count: int
    every_s: float = EVERY_S
    keep_text: bool = False
    excuses: bool = True


def killed(
    plan: Plan,
    target: Target | str,
    deployment: Deployment,
    flows: Sequence[Flow],
    victims: Callable[[Mapping[str, Any]], Sequence[Victim]],
    mend: Callable[[Victim], None] = lambda victim: None,
) -> Iterator[dict[str, Any]]:
    """Kill after kill under load, each once all is whole again; then what became of the requests. Where none is excused
    also how long streams paused, and others took to their first token.

    Args:
        victims: from a status to what may be killed.
        mend: brings back what nobody else would.
    """
    draw, part = random.Random(1), plan.part
    with SenderProcess() as sender:
        begun, kills = time.perf_counter(), list[Kill]()
        sender.start(target, *flows, limit_s=LIMIT_S, decode=True, keep_text=plan.keep_text)
        while len(kills) < plan.count:
            time.sleep(max(0.0, (kills[-1].at_s if kills else begun) + plan.every_s - time.perf_counter()))
            deployment.whole(WHOLE_S)
            if time.perf_counter() > begun + plan.seconds - EVERY_S:  # the load ends, and notices nothing any more
                break
            kills.append(kill(victims(deployment.status()), kills, draw))
            victim, at_s = kills[-1].victim, round(kills[-1].at_s - begun, 3)
            row = {"part": part, "kill": victim.name, "kind": victim.kind, "process": victim.process, "at": at_s}
            yield row
            mend(victim)
        deployment.whole(WHOLE_S)
        sender.enough()
        run = sender.finish()
        yield {"part": part, "held": deployment.emptied(EMPTY_S)}
    found = judged(
        run.rows, excused=lambda record: plan.excuses and excused(record, kills), at_rest=at_rest(target, flows)
    )
    yield from found.rows(part, run.begun_s)
    for record in () if plan.excuses else run.rows:
        if (gap := gap_s(record, kills)) is not None:
            yield {"part": part, "gap_s": round(gap, 4)}
        elif record.ok and record.sent_s is not None and record.token_s:
            yield {"part": part, "first_s": round(record.token_s[0] - record.sent_s, 4)}


def kill(victims: Sequence[Victim], before: Sequence[Kill], draw: random.Random) -> Kill:
    """Kills one of those kinds that have had the fewest kills before, drawn."""
    had = Counter(one.victim.kind for one in before)
    fewest = min(had[one.kind] for one in victims)
    kind = draw.choice(sorted({one.kind for one in victims if had[one.kind] == fewest}))
    victim = draw.choice(sorted((one for one in victims if one.kind == kind), key=lambda one: one.name))
    at_s = time.perf_counter()
    (signal_group if victim.group else signal_process)(victim.pid, signal.SIGKILL)
    until_s = at_s + GONE_S
    while stat(victim.pid) is not None and time.perf_counter() < until_s:
        time.sleep(LOOK_S)
    return Kill(at_s, time.perf_counter(), victim)


def local_victims(status: Mapping[str, Any]) -> list[Victim]:
    """Stages (their process groups), front doors and the process that controls all, of one machine."""
    parts = (process(name, one["pid"]) for name, one in status["parts"].items() if one["pid"] is not None)
    return [*stages(status), *(one for one in parts if one.kind in ("control", "front"))]


def stages(status: Mapping[str, Any]) -> list[Victim]:
    """Those that run, by the leaders of their process groups."""
    return [
        Victim("stage", one["id"], one["pid"], group=True, decodes=one["role"].endswith("D"))
        for one in status["instances"]
        if one["pid"] is not None
    ]


def stage_processes(status: Mapping[str, Any]) -> list[Victim]:
    """All processes of all stages, each alone and of the kind of its stage, and the template that forks stages."""
    leaders = {one.pid: one for one in stages(status)}
    roots = {leader.parent for leader in map(stat, leaders) if leader is not None}
    found = []
    for one in running():
        if (stage := leaders.get(one.group)) is not None:
            found.append(replace(stage, kind=stage.name, pid=one.pid, group=False, process=one.name))
        elif one.name == TEMPLATE_NAME and one.parent in roots:
            found.append(Victim("template", "template", one.pid, process=one.name))
    return found


def process(name: str, pid: int) -> Victim:
    """A process of a status that is no stage: `front.0` is of the kind `front`."""
    kind = name.partition(".")[0]
    return Victim(kind, name, pid, front=kind == "front")


def excused(record: RequestRecord, kills: Sequence[Kill]) -> bool:
    """Whether it was on a front door that was killed, or found none because its socket had gone, too."""
    for one in kills:
        if not (one.victim.front and one.at_s <= record.ended_s <= one.at_s + GONE_S):
            continue
        if record.sent_s is None:
            if one.victim.listens and record.fault == UNREACHABLE:
                return True
        elif record.sent_s <= one.gone_s and record.fault in ("broken", CUT):
            return True
    return False


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
