"""A day of ModServe's comparison (§5.2), simulated: how few devices suffice for it, as a fixed layout and followed.

128 devices of the paper with its larger model, Azure's traffic with one burst of images (`bench/follow/traffic.py`).
The day is pressed: an hour of it passes in `hour_s`. Starts and decisions take as long as they do, so that a follower
has fewer of the day's minutes for them than it had in a real one.

What is fixed are ModServe's kinds of layout: monoliths, and stages on devices of their own. Stages that share a device
are left out: how much they slow each other nobody has printed for this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from bench.follow.traffic import day
from bench.micro.measurement import Row
from deploy.follow.simulated import SimulatedFollower
from deploy.follow.types import Limits
from deploy.planner.fleet import Fleet
from deploy.planner.profile import read_device_profile
from deploy.planner.simulate import Served, simulate
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo

PROFILE = "bench/planner/profiles/internvl2.5-26b-a100.json"
SLO = Slo(20_000, 400, "mean")
"""That of ModServe's autoscaling here (`bench/planner/presets/modserve-f16.json`): prompts of 16 images are in it."""
SHARE = 0.99
"""Of the day's requests, that are to be within it."""
DEVICES, START_S = 128, 30.0
"""Seconds from a start until an instance serves: weights of 52 GB from memory, and the engine around them."""
SEED, HOURS, PROCESSES = 1, 24, 2
MONOLITHS = "TP4x32"
POOLS, APART = "16E-16PD", "16E-16P-4D"
"""What a follower begins with, at midnight: ModServe's two pools, and decoding apart, where P and D can switch."""


@dataclass(frozen=True)
class Case:
    """What serves the day.

    Attributes:
        what: `fixed`, or how it is followed.
    """

    what: str
    layout: str
    switchable: bool = False
    forecast: bool = True


FIXED = tuple(Case("fixed", layout) for layout in ("58E-58PD", "60E-60PD", "TP4x29", "TP4x30", MONOLITHS))
"""Of each kind, around the fewest devices that hold; with --quick only 30 monoliths of four, which do."""
FOLLOWED = (
    Case("follow", POOLS),
    Case("reactive", POOLS, forecast=False),
    Case("switching", APART, switchable=True),
    Case("no switching", APART),
)
QUICK = (FOLLOWED[0], FIXED[3])


class Reactive(SimulatedFollower):
    """Takes what comes now for what will come."""

    def _decide(self, fleet: Fleet) -> None:
        super()._decide(fleet)
        self._memory = replace(self._memory, trends={})


def measure(profile: Path, cases: Sequence[Case], hour_s: float) -> Iterator[Row]:
    """One row for each, and one for how long it all took."""
    begun_s = time.monotonic()
    with ProcessPoolExecutor(PROCESSES, get_context("forkserver")) as pool:
        yield from pool.map(_served, [profile] * len(cases), cases, [hour_s] * len(cases))
    yield {"part": "day", "what": "all", "seconds": round(time.monotonic() - begun_s, 1)}


def _served(profile_path: Path, case: Case, hour_s: float) -> Row:
    """The day, as it was served."""
    profile, requests, layout = read_device_profile(profile_path), day(hour_s, SEED), parse(case.layout)
    if case.what == "fixed":
        follower, run = None, simulate(layout, profile, requests, slos=(SLO,))
    else:
        kind = SimulatedFollower if case.forecast else Reactive
        limits = Limits(DEVICES, switchable=case.switchable)
        follower = kind(layout, profile, limits, START_S, SLO.tpot_ms / 1e3)
        run = simulate(layout, profile, requests, slos=(SLO,), tick=(1.0, follower))
    moves = [one for one in follower.decisions if one.chosen is not None] if follower is not None else []
    return {
        "part": "day",
        "what": case.what,
        "layout": case.layout,
        "requests": len(requests),
        "devices": round(run.device_s / run.span_s, 2),
        "attained": round(run.attained(0), 4),
        "worst_hour": round(_worst_hour(run.served, hour_s), 4),
        "dropped": sum(one.last_s == float("inf") for one in run.served),
        "moves": len(moves),
        "flips": sum(one.chosen is not None and one.chosen.what == "flip" for one in moves),
        "hour_s": hour_s,
        "start_s": START_S,
    }


def _worst_hour(served: Sequence[Served], hour_s: float) -> float:
    """Of the day's hours, each by its own requests."""
    hours: list[list[bool]] = [[] for _ in range(HOURS)]
    for one in served:
        attained = SLO.attained(one.ttft_s, one.tpot_s, one.gaps, one.within[0])
        hours[min(HOURS - 1, int(one.at_s / hour_s))].append(attained)
    return min(sum(hour) / len(hour) for hour in hours if hour)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Of the rows of this part. Static peak provisioning is the fixed layout with the fewest devices that holds."""
    named = dict[str, float]()
    holds = [row["devices"] for row in rows if row["what"] == "fixed" and row["attained"] >= SHARE]
    by_what = {row["what"]: row for row in rows if row["what"] != "fixed"}
    if (follow := by_what.get("follow")) is None or not holds:
        return named
    named["day_devices_over_static"] = round(follow["devices"] / min(holds), 4)
    named["day_attainment"], named["day_dropped"] = follow["attained"], float(follow["dropped"])
    named["day_worst_hour"] = follow["worst_hour"]
    named["day_over_tp4"] = round(follow["devices"] / parse(MONOLITHS).device_count, 4)
    for what in ("reactive", "switching", "no switching"):
        if (row := by_what.get(what)) is not None:
            name = f"day_{what.replace(' ', '_')}"
            named[f"{name}_over_static"] = round(row["devices"] / min(holds), 4)
            named[f"{name}_attainment"] = row["attained"]
    if "all" in by_what:
        named["day_s"] = by_what["all"]["seconds"]
    return named
