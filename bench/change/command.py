"""`epd-bench change`: what clients notice while a deployment is changed, or while its parts are killed.

In parts (`--only`), each under load all the time:

    walk    real stages, the demo model, answers judged by what is in the picture: EP-D, E-P-D, (E-P)-D, (E-PD)x2,
            TP1x2 and back, round after round; new requests wait where there is no room for two layouts
    flips   P and D of simulated stages that become each other without a restart
    kills   kill -9 of stages, front doors and control in random order: real stages, the next once all is
            whole; and simulated stages, two of each role, every ten seconds
    streams kill -9 under long streams: of instances that decode, 2P-4D simulated, 200 of 100 tokens at a time, through
            two front doors; of any process of any stage and of the template, 2P-2D real, 60 of 200 tokens, each
            compared with the answer at rest
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from bench.change import streams
from bench.change.deployment import commanded
from bench.change.kills import kills_real, kills_simulated
from bench.change.loads import PROFILE, judged, simulated_flows
from bench.change.walk import walk
from bench.clients.process import SenderProcess
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, one_of, positive, several, whole
from bench.served import simulated
from bench.statistic import percentile

STAGES = {
    "walk": "real",
    "flips": "simulated",
    "kills": "simulated, then real",
    "streams": "simulated, then real",
}
"""Stages of each part."""

PARTS = tuple(STAGES)
FLAGS = {
    "--only": flag("parts of it", PARTS, several(one_of(*PARTS))),
    "--minutes": flag("of the walk", Usually(15.0, quick=3.0), positive),
    "--per-s": flag("requests a second of simulated stages", Usually(200.0, quick=50.0), positive),
    "--flips": flag("so many", Usually(100, quick=20), whole()),
    "--kills": flag("of real stages", Usually(30, quick=3), whole()),
    "--stream-kills": flag("under streams, of each kind of stages", Usually(12, quick=3), whole()),
    "--kill-minutes": flag("of simulated stages", Usually(10.0, quick=1.0), positive),
}
GOALS = (
    Goal("walk_client_errors", "==", 0, "nobody notices a change"),
    Goal("walk_cut_streams", "==", 0, "what has begun is finished"),
    Goal("walk_wrong_answers", "==", 0, "answers as they are at rest"),
    Goal("kills_client_errors", "==", 0, "but for connections of a killed front door"),
    Goal("kills_cut_streams", "==", 0, "a stream goes on when its D is killed"),
    Goal("kills_held", "==", 0, "nothing is counted any more of what has ended"),
    Goal("flip_errors", "==", 0),
    Goal("flip_p99_s", "<=", 1.0),
)
KILL_S = 60.0
"""That the next kill of real stages takes at most, by experience."""
FLIPPED = "2P-2D"
COUNTS = ({"P": 1, "D": 3}, {"P": 2, "D": 2}, {"P": 3, "D": 1}, {"P": 2, "D": 2})
FLIP_S = 2.0
"""At most, with the pause between two: for how long the load lasts."""
APART_S = 0.3
LIMIT_S = 60.0


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Part by part."""
    seconds = 60.0 * arguments.minutes
    if "walk" in arguments.only:
        yield from walk(seconds)
    if "flips" in arguments.only:
        yield from flips(arguments.flips, arguments.per_s / 2)
    if "streams" in arguments.only:
        yield from streams.streams_simulated(arguments.stream_kills)
        yield from streams.streams_real(arguments.stream_kills)
    if "kills" in arguments.only:
        yield from kills_simulated(60.0 * arguments.kill_minutes, arguments.per_s / 4)
        yield from kills_real(KILL_S * arguments.kills, arguments.kills)


def flips(count: int, per_s: float) -> Iterator[Row]:
    """P and D that become each other under load, so many times, one after another."""
    with simulated(FLIPPED, PROFILE, ["--switchable"]) as launch, commanded(launch) as deployment:
        seconds = count * (FLIP_S + APART_S)
        with SenderProcess() as sender:
            begun = time.perf_counter()
            sender.start(launch.url, *simulated_flows(launch.model, seconds, per_s), limit_s=LIMIT_S, decode=True)
            for turn in range(count):
                time.sleep(APART_S)
                if time.perf_counter() > begun + seconds:  # the load is over: what it notices no more is no flip
                    break
                change = deployment.scale(COUNTS[turn % len(COUNTS)])
                done = [step["action"] for step in change["steps"]]
                yield {
                    "part": "flips",
                    "to": change.get("to", ""),
                    "seconds": change["seconds"],
                    "client_s": change.get("client_s", 0.0),
                    "flipped": change.get("state") == "done" and "flip" in done and "start" not in done,
                    "why": change.get("refused") or change.get("reason", ""),
                }
            run = sender.finish()
        yield from judged(run.rows).rows("flips", run.begun_s)


def about(arguments: argparse.Namespace) -> dict[str, str]:
    return {"kind": ", ".join(f"{part}: {STAGES[part]} stages" for part in arguments.only)}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Of each part that was measured."""
    named: dict[str, float] = {}
    if (total := _total(rows, "walk")) is not None:
        steps = [row for row in rows if row["part"] == "walk" and "state" in row]
        named |= {
            "walk_requests": total["requests"],
            "walk_client_errors": total["errors"],
            "walk_cut_streams": total["cut"],
            "walk_wrong_answers": total["wrong"],
            "walk_changes": len(steps),
            "walk_changes_failed": sum(row["state"] != "done" for row in steps),
            "walk_longest_change_s": max((row["seconds"] for row in steps), default=0.0),
            "walk_longest_pause_s": max((row["paused_s"] for row in steps), default=0.0),
        }
    if (total := _total(rows, "flips")) is not None:
        made = [row for row in rows if row["part"] == "flips" and "flipped" in row]
        named |= {
            "flips": sum(row["flipped"] for row in made),
            "flip_errors": total["errors"] + total["cut"] + sum(not row["flipped"] for row in made),
        }
        if made:
            named |= {f"flip_p{p}_s": percentile([row["client_s"] for row in made], p) for p in (50, 99)}
    parts = ("kills", "kills_simulated", "streams", "streams_simulated")
    killed = {part: total for part in parts if (total := _total(rows, part)) is not None}
    if killed:
        named["kills_client_errors"] = sum(one["errors"] + one["wrong"] for one in killed.values())
        named["kills_cut_streams"] = sum(one["cut"] for one in killed.values())
        named["kills"] = sum("kill" in row for row in rows)
        named["kills_held"] = sum(row.get("held", 0) for row in rows)
        named["streams"] = sum(one["requests"] for part, one in killed.items() if part.startswith("streams"))
    return named | streams.figures(rows)


def _total(rows: Sequence[Row], part: str) -> Row | None:
    return next((row for row in rows if row["part"] == part and "requests" in row), None)


MEASUREMENT = Measurement(
    quick="shorter walks, fewer flips and kills",
    measure=measure,
    figures=figures,
    flags=FLAGS,
    goals=GOALS,
    about=about,
)
add_arguments = MEASUREMENT.add_arguments
