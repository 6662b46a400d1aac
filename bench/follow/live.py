"""A load that swings, on deployments that run: 16 simulated stages with real proxy, control, starts and changes.

Three deployments get the same requests, one after another: one that follows the load, one whose layout an oracle
changes, who knows when the load turns and which layout is best then, and one that keeps the best fixed layout. What
the simulator says of each comes first, in rows of its own. Goodput is requests a second of the load that were answered
whole within the SLO.

The device is made up of a measured one: all steps take five times as long, so that 16 stages, proxy and clients are
less than two cores have to do. The load was chosen by the oracle beside fixed layouts, in the simulator. Layouts with
stages that share a device are predicted and left out live: simulated stages on one device do not slow each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from bench.change.deployment import Deployment, commanded
from bench.change.loads import judged
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow, Run
from bench.clients.slo import attains
from bench.clients.target import Request
from bench.follow.oracle import Scheduled, Turn
from bench.follow.traffic import Phase, requests_of
from bench.micro.measurement import Row
from bench.served import Served, simulated
from bench.workloads.synthetic import image_body, text_body
from deploy.agent.cpu_time import Parts, cpu_seconds, groups, parts, since
from deploy.follow.simulated import SimulatedFollower
from deploy.follow.types import Limits
from deploy.planner.fleet import Options
from deploy.planner.profile import DeviceProfile
from deploy.planner.simulate import Simulated, simulate
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from epd_serve.sim.profile import Line
from epd_serve.slo import Slo
from epd_serve.traffic import Item
from epd_serve.traffic import Request as Traffic

DEVICES, START_S = 16, 4.0
SLOWER = 5.0
SLO = Slo(5000, 600, "p98")
"""TTFT five times that of a picture alone. Of the 95 gaps of an answer to text one may be late; a first one alone,
which waits for KV and for others to join, can take 0.4 s. A picture holds up all that decode beside it for 0.96 s."""
BY_SLO = Options(budgets=SLO)
"""Stages that are told an objective hold their steps to it, and so do those that are predicted."""
SIDE, PICTURE_TOKENS = 392, 196
QUESTION_TOKENS, SHORT, LONG = 32, 8, 96
PHASES = (Phase(1.0, 2.0, 9.0), Phase(1.0, 17.0, 1.5))
"""Requests a second: image-heavy, text-heavy; 0.63 and 0.66 of all devices' time."""
MEDIA, TEXT = "5E-7P-4D", "E-4P-11D"
"""The best for each phase."""
FIXED = ("2E-4P-10D", "4E-5P-7D", TEXT, MEDIA, "TP1x16")
COLOCATED = ("(E-PD)x16", "(E-P)x8-8D")
LEADS_S = (0.0, START_S, 2 * START_S)
SEED = 3
RUNS = ("follow", "oracle", "fixed")
LIMIT_S = 300.0
"""Of one request: in a layout that lacks what the load needs queues are as long as a phase."""
SETTLED_S = 3.0
"""Until the sender's process and the first reports of all stages are there."""


@dataclass(frozen=True)
class Load:
    """What comes, the same for every deployment.

    Attributes:
        turns: an oracle's layouts, the first of them from the beginning.
    """

    requests: Sequence[Traffic]
    half_s: float
    turns: Sequence[Turn]

    @property
    def seconds(self) -> float:
        return self.half_s * len(self.turns)

    def flows(self, model: str) -> list[Flow]:
        """Every request is one of its own, so no cache answers any of it."""
        texts, pictures = [], []
        for seed, one in enumerate(self.requests):
            if one.items:
                body = image_body(model, side=SIDE, answer=SHORT, stream=True, seed=seed)
                pictures.append((one.at_s, Request.of(body)))
            else:
                body = text_body(model, tokens=QUESTION_TOKENS, answer=LONG, stream=True, seed=seed)
                texts.append((one.at_s, Request.of(body)))
        return [flow_of("text", texts), flow_of("media", pictures)]


def flow_of(kind: str, drawn: Sequence[tuple[float, Request]]) -> Flow:
    """An open loop of requests at their times."""
    return Flow([request for _, request in drawn], kind, dues=[at_s for at_s, _ in drawn])


def load_of(half_s: float, cycles: int) -> Load:
    phases = [Phase(half_s, one.text_rps, one.media_rps) for one in PHASES] * cycles
    turns = [(turn * half_s, (MEDIA, TEXT)[turn % 2]) for turn in range(len(phases))]
    return Load([_sized(one) for one in requests_of(phases, SEED)], half_s, turns)


def _sized(one: Traffic) -> Traffic:
    if not one.items:
        return replace(one, prompt_tokens=QUESTION_TOKENS, output_tokens=LONG)
    picture = Item(PICTURE_TOKENS, SIDE, SIDE)
    return replace(one, prompt_tokens=QUESTION_TOKENS + PICTURE_TOKENS, output_tokens=SHORT, items=(picture,))


def slower(profile: DeviceProfile, times: float = SLOWER) -> DeviceProfile:
    """A device on which every step takes so many times as long. What a front door of vLLM takes is left out, for there
    is none before simulated stages; features are small, for they are really moved."""

    def line(one: Line) -> Line:
        return Line(one.setup_s * times, one.per_unit_s * times)

    stage = profile.stages[1]
    stage = replace(
        stage,
        encode=line(stage.encode),
        prefill=line(stage.prefill),
        encode_context_s=stage.encode_context_s * times,
        prefill_context_s=stage.prefill_context_s * times,
        decode_step_s=tuple((batch, seconds * times) for batch, seconds in stage.decode_step_s),
        decode_kv_s=stage.decode_kv_s * times,
        feature_bytes_per_token=256,
    )
    left_out = {"front": Line(), "front_busy": Line(), "handover": Line(), "spread": ()}
    return replace(profile, stages={1: stage}, start_s=START_S, **left_out)


def live(profile: DeviceProfile, half_s: float, cycles: int, *, served: Sequence[str] = RUNS) -> Iterator[Row]:
    """Args:
    profile: of a device. served: which of `RUNS`; of the others there is only what the simulator says. The fixed
        layout is served one cycle: it is compared by the phases that both had.
    """
    device, load = slower(profile), load_of(half_s, cycles)
    said = list(predictions(device, load))
    yield from said
    fixed = max((row for row in said if row["what"] in FIXED), key=lambda row: row["goodput_rps"])["what"]
    leads = [row for row in said if row["what"].startswith("oracle")]
    lead_s = max(leads, key=lambda row: row["goodput_rps"])["lead_s"]
    turns = [(at_s - lead_s, layout) for at_s, layout in load.turns[1:]]
    runs = {
        "follow": ("follow", MEDIA, "act", load, ()),
        "oracle": (f"oracle {lead_s:g} s ahead", MEDIA, "off", load, turns),
        "fixed": (fixed, fixed, "off", load_of(half_s, 1), ()),
    }
    for what, layout, mode, own, changes in (runs[name] for name in served):
        with simulated(layout, builtins(device), _flags(layout, mode)) as launch:
            flows = own.flows(launch.model)
            row = run_load(launch, flows, SLO, phase_s=half_s, seconds=own.seconds, turns=changes)
        yield {"part": "live", "how": "measured", "what": what, **row}


def predictions(device: DeviceProfile, load: Load) -> Iterator[Row]:
    """A row for each deployment that may be measured, and for those with stages that share devices."""

    def said(what: str, run: Simulated, **more: Any) -> Row:
        return {"part": "live", "how": "predicted", "what": what, **predicted(run, load.seconds), **more}

    for layout in (*FIXED, *COLOCATED):
        yield said(layout, simulate(parse(layout), device, load.requests, slos=(SLO,), options=BY_SLO))
    for lead_s in LEADS_S:
        turns = [(at_s - lead_s, layout) for at_s, layout in load.turns]
        limits = Limits(DEVICES, every_s=1.0, switchable=True)
        oracle = Scheduled(parse(MEDIA), device, limits, START_S, schedule=turns)
        yield said(f"oracle {lead_s:g} s ahead", _ticked(oracle, load), lead_s=lead_s)
    limits = Limits(DEVICES, switchable=True)
    follower = SimulatedFollower(parse(MEDIA), device, limits, START_S, SLO.tpot_ms / 1e3)
    run = _ticked(follower, load)
    yield said("follow", run, moves=sum(one.chosen is not None for one in follower.decisions))


def predicted(run: Simulated, seconds: float) -> Row:
    """Of a run that was asked about one SLO. `seconds`: of the load."""
    requests, attained = len(run.served), run.attained(0)
    rps = attained * requests / seconds
    return {"requests": requests, "attained": round(attained, 4), "goodput_rps": round(rps, 3)}


def _ticked(follower: SimulatedFollower, load: Load) -> Simulated:
    return simulate(follower.layout, follower.profile, load.requests, slos=(SLO,), options=BY_SLO, tick=(1.0, follower))


def builtins(device: DeviceProfile) -> Mapping[str, Any]:
    """As `simulated` takes a profile."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(device))
    return made


def _flags(layout: str, mode: str) -> list[str]:
    """Groups stay as they are: stages that share a device would be faster here than they are."""
    switchable = ["--switchable"] if {Role.P, Role.D} <= parse(layout).roles else []
    return ["--device", "cpu", *switchable, "--follow", mode, "--follow-relayout", "off", *slo_flags(SLO)]


def slo_flags(slo: Slo) -> list[str]:
    """Of `epd-serve serve`."""
    limits = (f"slo.ttft_s={slo.ttft_ms / 1e3:g}", f"slo.tpot_s={slo.tpot_ms / 1e3:g}", f"slo.judge={slo.judge}")
    return [word for limit in limits for word in ("--proxy", limit)]


# --- any deployment ---------------------------------------------------------------------------------------------------


def run_load(
    launch: Served,
    flows: Sequence[Flow],
    slo: Slo,
    *,
    phase_s: float,
    seconds: float,
    turns: Sequence[Turn] = (),
    limit_s: float = LIMIT_S,
) -> Row:
    """Send all flows, and have the layout changed at the turns. Returns what came of it (`outcome`), what was changed,
    by the follower (`moves`) or by the turns (`changes`), and the share of all cores that stages, proxy, control and
    clients took (`cpu`; stages that have gone do not count), and all processes of the machine.

    Args:
        phase_s: of a phase of the load. seconds: of the whole.
    """
    with commanded(launch) as deployment, SenderProcess() as sender:
        time.sleep(SETTLED_S)
        busy_s, own, begun = machine_busy_s(), cpu_seconds(launch.cpu_parts), time.perf_counter()
        sender.start(launch.url, *flows, limit_s=limit_s, decode=True)
        changes = list(_changed(deployment, turns, begun))
        time.sleep(max(0.0, begun + seconds - time.perf_counter()))
        cores_s = (time.perf_counter() - begun) * (os.cpu_count() or 1)
        machine_cpu = (machine_busy_s() - busy_s) / cores_s
        own_s = sum(since(own, cpu_seconds(_parts_now(launch))).values())
        run = sender.finish()
        decided, layout = deployment.decisions(), deployment.status()["layout"]
    return {
        **outcome(run, slo, seconds, phase_s),
        "cpu": round((own_s + run.cpu_s) / cores_s, 3),
        "machine_cpu": round(machine_cpu, 3),
        "changes": changes,
        "moves": [one for one in decided if one["chosen"] is not None],
        "layout_at_end": layout,
    }


def _changed(deployment: Deployment, turns: Sequence[Turn], begun: float) -> Iterator[Row]:
    for at_s, layout in turns:
        time.sleep(max(0.0, begun + at_s - time.perf_counter()))
        change = deployment.relayout(layout)
        about = {name: change[name] for name in ("state", "reason", "refused", "seconds") if change.get(name)}
        yield {"at_s": round(at_s, 1), "to": layout, **about}


def outcome(run: Run, slo: Slo, seconds: float, phase_s: float) -> Row:
    """Goodput and errors of a run; by kind the share of requests within the SLO; by phase how many there were, and how
    many of them within it."""
    found = judged(run.rows)
    kinds: dict[str, list[bool]] = {}
    phases: dict[int, list[int]] = {}
    for one in run.rows:
        good = attains(one, slo)
        kinds.setdefault(one.kind, []).append(good)
        count = phases.setdefault(int((one.due_s - run.begun_s) / phase_s), [0, 0])
        count[0] += 1
        count[1] += good
    attained = sum(good for _, good in phases.values())
    return {
        "requests": found.requests,
        "attained": round(attained / max(1, found.requests), 4),
        "goodput_rps": round(attained / seconds, 3),
        "errors": len(found.errors),
        "cut": len(found.cut),
        "faults": sorted({one.fault for one in (*found.errors, *found.cut)}),
        "by_kind": {kind: round(sum(goods) / len(goods), 4) for kind, goods in sorted(kinds.items())},
        "phases": [phases[at] for at in sorted(phases)],
    }


def _parts_now(launch: Served) -> Parts:
    """With the stages that were started since it was ready, and without those that have gone."""
    return parts(launch.cpu_parts["proxy"][0], groups(launch.run.parent))


def machine_busy_s() -> float:
    """Core-seconds that this machine has computed since its start, whoever for."""
    first, _ = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)
    user, nice, system, _, _, irq, softirq, *_ = map(int, first.split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def figures(rows: Sequence[Row]) -> dict[str, float]:
    own = [row for row in rows if row["part"] == "live"]
    named: dict[str, float] = {}
    for how, prefix in (("measured", "live"), ("predicted", "live_predicted")):
        by_what = {row["what"]: row for row in own if row["how"] == how}
        oracles = [row for what, row in by_what.items() if what.startswith("oracle")]
        fixed = [row for what, row in by_what.items() if what in FIXED]
        if (follow := by_what.get("follow")) is None or not oracles or not fixed:
            continue
        named[f"{prefix}_over_oracle"] = over(follow, oracles)
        named[f"{prefix}_over_best_fixed"] = over(follow, fixed)
    if measured := [row for row in own if row["how"] == "measured"]:
        named["live_errors"] = float(sum(row["errors"] + row["cut"] for row in measured if row["what"] not in FIXED))
        named |= {f"live_{name}": max(row[name] for row in measured) for name in ("cpu", "machine_cpu")}
    return named


def over(row: Row, others: Sequence[Row]) -> float:
    """Goodput over that of the best of the others; of runs that were measured, over the phases that both had."""

    def ratio(other: Row) -> float:
        if "phases" not in row:
            return float(row["goodput_rps"]) / float(other["goodput_rps"])
        both = list(zip(row["phases"], other["phases"], strict=False))
        return float(sum(own[1] for own, _ in both) / sum(its[1] for _, its in both))

    return round(min(map(ratio, others)), 4)
