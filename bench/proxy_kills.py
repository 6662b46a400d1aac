"""What clients notice while stages die: one killed (SIGKILL) every ten seconds, under load with capacity to spare.

2E-2P-2D of simulated stages, and with `--real` fewer real ones too, less often; each in turn, and none while another of
its role is down. Text and pictures, whole answers and streams. An answer of which the client has had nothing can be
made elsewhere, so it may not fail: those that do are `client_errors_under_kills`. A stream that has begun on a decode
instance that dies cannot be taken over; the promise is an error event, no [DONE] and a closed connection. Those are
`streams_cut_by_kills`; one that ends in any other way is a client error.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.flow_process import FlowGenerator
from bench.flows import CUT, GOOD, Flow, Outcome
from bench.front_door import counters, held, instances, total, until
from bench.goals import Goal
from bench.proxy_part import Found, Options, Part
from bench.proxy_speed import simulated
from bench.scenario_bodies import picture, text
from bench.served import Served, groups, served
from bench.statistic import percentile
from bench.workloads.arrivals import Poisson, arrivals_within
from deploy.placement_table import table
from epd_serve.errors import StageError

PROFILE = {
    "comment": "made up; the load below keeps it about a fifth busy",
    "encode": {"setup_s": 0.02, "per_unit_s": 0.00005},
    "prefill": {"setup_s": 0.01, "per_unit_s": 0.0001},
    "kv": {"setup_s": 0.005, "per_unit_s": 1e-10},
    "decode_step_s": [[1, 0.02], [64, 0.04]],
    "jitter": 0.1,
    "feature_bytes_per_token": 256,
}
EMPTY_S = 20.0
SETTLE_S = 3.0
LOOK_S = 0.1

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How it is done.

    Attributes:
        every_s: between two kills; up_within_s: how long an instance may take to be back.
        answer: tokens of an answer. side: of the pictures.
    """

    layout: str
    seconds: float
    every_s: float
    up_within_s: float
    text_per_s: float
    pictures_per_s: float
    tokens: int
    answer: int
    side: int
    limit_s: float


@dataclass(frozen=True)
class Kill:
    """`at`: seconds from the start of the run."""

    at: float
    instance: str


def plan(quick: bool, *, real: bool) -> Plan:
    if real:
        return Plan("1E-2P-2D", 90.0 if quick else 300.0, 20.0, 240.0, 0.7, 0.3, 32, 12, 224, 180.0)
    return Plan("2E-2P-2D", 60.0 if quick else 300.0, 10.0, 60.0, 12.0, 4.0, 100, 12, 336, 60.0)


def measure(options: Options) -> Found:
    """Of simulated stages; with `options.real` of real ones too, whose figures end in `_real`."""
    found = [
        _measured(plan(options.quick, real=real), real=real) for real in ((False, True) if options.real else (False,))
    ]
    figures = {name: value for one in found for name, value in one.figures.items()}
    return Found(figures, [row for one in found for row in one.rows], "\n\n".join(one.text for one in found))


def _measured(how: Plan, *, real: bool) -> Found:
    stages = served(how.layout, ["--device", "cpu"], traced=False) if real else simulated(how.layout, PROFILE)
    with stages as launch, FlowGenerator() as generator:
        retries_before = total(counters(launch.url, "epd_proxy_retries_total"))
        generator.start(launch.url, _flows(launch.model, how), limit_s=how.limit_s)
        begun = time.perf_counter()
        kills = list(_killing(launch, how, begun))
        run = generator.finish()
        retries = counters(launch.url, "epd_proxy_retries_total")
        until(lambda: not held(launch.url), EMPTY_S)
        still_held = held(launch.url)
    kills = [Kill(kill.at + begun - run.begun_s, kill.instance) for kill in kills]
    figures, bad = judged(run.outcomes, kills)
    figures |= {
        "retries_under_kills": total(retries) - retries_before,
        "held_after_kills": float(sum(still_held.values())),
    }
    suffix = "_real" if real else ""
    figures = {f"{name}{suffix}": value for name, value in figures.items()}
    rows: list[Row] = [{"kill": kill.instance, "at": round(kill.at, 3)} for kill in kills]
    rows += [{"request": one.kind, "due": round(one.due, 3), "verdict": one.verdict, "said": one.said} for one in bad]
    rows.append({"held": still_held, "retries": retries})
    return Found(figures, [{**row, "real": real} for row in rows], _table(figures, kills, bad, real))


PART = Part(
    "kills",
    "clients' errors while a stage is killed every ten seconds",
    measure,
    (
        Goal("client_errors_under_kills", "==", 0.0, "nobody loses an answer of which nothing was sent"),
        Goal("client_errors_under_kills_real", "==", 0.0, "with --real"),
        Goal("held_after_kills", "==", 0.0, "no load leaks, whatever the ending"),
    ),
)


def judged(outcomes: Sequence[Outcome], kills: Sequence[Kill]) -> tuple[dict[str, float], list[Outcome]]:
    """Figures, and the requests that were not answered well."""
    bad = [one for one in outcomes if one.verdict != GOOD]
    cut = [one for one in bad if one.verdict == CUT and one.begun]
    hit = [one for one in outcomes if any(one.due <= kill.at <= one.ended for kill in kills)]
    figures = {
        "client_errors_under_kills": float(len(bad) - len(cut)),
        "streams_cut_by_kills": float(len(cut)),
        "kills": float(len(kills)),
        "requests_under_kills": float(len(outcomes)),
        "requests_hit": float(len(hit)),
    }
    for name, some in (("hit", hit), ("other", [one for one in outcomes if one not in set(hit)])):
        times = [one.whole_s for one in some if one.verdict == GOOD]
        if times:
            figures |= {f"{name}_whole_p{p}_ms": round(percentile(times, p) * 1e3, 1) for p in (50, 99)}
    return figures, bad


def victim(views: Sequence[Mapping[str, Any]], after: str) -> str | None:
    """The next instance to kill after `after`, in turn, of a role of which all are up and, where another role cannot
    stand in for it, there is another. None while there is none."""
    names: list[str] = sorted((view["id"] for view in views), key=lambda name: (name[1:], name[:1]))  # E0 P0 D0 E1 …
    roles: dict[str, list[bool]] = {}
    for view in views:
        roles.setdefault(view["role"], []).append(view["up"])
    role = {view["id"]: view["role"] for view in views}
    at = names.index(after) + 1 if after in names else 0
    for name in names[at:] + names[:at]:
        ups = roles[role[name]]
        if all(ups) and (len(ups) > 1 or role[name] == "E"):
            return name
    return None


def _killing(launch: Served, how: Plan, begun: float) -> Iterator[Kill]:
    """Kill until shortly before the end of the load. `at` counts from `begun`."""
    name, due, end = "", begun + SETTLE_S, begun + SETTLE_S + how.seconds
    while (due := due + how.every_s) < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        name = _next_victim(launch, name, how.up_within_s)
        os.killpg(groups(launch.run.parent)[name], signal.SIGKILL)
        now = time.perf_counter()
        yield Kill(now - begun, name)
        due = max(due, now - how.every_s)


def _next_victim(launch: Served, after: str, within_s: float) -> str:
    """Wait until there is one. Raises StageError where that takes too long."""
    end = time.monotonic() + within_s
    while (name := victim(instances(launch.url), after)) is None:
        if time.monotonic() >= end:
            raise StageError(f"after the kill of {after} not every role was back in {within_s:g} s", stage=after)
        time.sleep(LOOK_S)
    return name


def _flows(model: str, how: Plan) -> list[Flow]:
    seconds = SETTLE_S + how.seconds + how.every_s
    shown = arrivals_within(Poisson(how.pictures_per_s), seconds, seed=2)
    words = [text(model, tokens=how.tokens, answer=how.answer, stream=bool(turn % 2), seed=turn) for turn in range(32)]
    pictures = [
        picture(model, side=how.side, answer=how.answer, stream=bool(turn % 2), seed=turn) for turn in range(len(shown))
    ]
    return [
        Flow("text", words, arrivals_within(Poisson(how.text_per_s), seconds, seed=1)),
        Flow("picture", pictures, shown),
    ]


def _table(figures: Mapping[str, float], kills: Sequence[Kill], bad: Sequence[Outcome], real: bool) -> str:
    lines = [("figure", "found"), *((name, f"{value:g}") for name, value in figures.items())]
    said = [f"  {one.due:8.2f} s  {one.kind}  {one.verdict}  {one.said!r}" for one in bad[:20]]
    killed = ", ".join(f"{kill.instance} at {kill.at:.1f} s" for kill in kills)
    return "\n".join([table(lines), f"  {'real' if real else 'simulated'} stages killed: {killed}", *said])
