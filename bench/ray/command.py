"""`epd-bench ray`: what a deployment on Ray costs over a local one, and what its clients notice of deaths and changes.

Three nodes of one cluster on this machine, a layout of twelve simulated stages over them. In parts (`--only`):

    ready     from the start of `epd-serve serve` to its ready message, local and on Ray in turns
    ttft      time to first token, local and on Ray in turns, and the CPU time of Ray's own processes
    kills     kill -9 of raylets, of controller, actors, processes and front doors of nodes, and of stages, in turn and
              in random order, under load
    relayout  from one layout to another under load
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from bench.change.kills import Plan, Victim, killed
from bench.change.loads import simulated_flows
from bench.change.walk import walked
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, one_of, positive, several, whole
from bench.micro.rows import grouped, median, quartiles, ratios
from bench.ray.deployed import LAYOUT, RAYLET, commanded_on_ray, on_ray, victims
from bench.ray.nodes import RayNodes, ray_nodes
from bench.ray.overhead import LOCAL, RAY, first_tokens, starts

PARTS = ("ready", "ttft", "kills", "relayout")
LAYOUTS = ("3E-4P-5D", "(E-P)x2-2P-6D", "2E-6P-4D", LAYOUT)
KILL_S = 40.0
"""That the next kill takes at most, by experience: a node that is lost is added again."""

FLAGS = {
    "--only": flag("parts of it", PARTS, several(one_of(*PARTS))),
    "--rounds": flag("of turns", Usually(9, quick=5), whole()),
    "--starts": flag("of each runtime", Usually(5, quick=1), whole()),
    "--per-s": flag("requests a second", Usually(50.0, quick=20.0), positive),
    "--kills": flag("so many", Usually(27, quick=9), whole()),
    "--minutes": flag("of changes", Usually(5.0, quick=1.5), positive),
}
GOALS = (
    Goal("ray_ttft_over_local", "<=", 1.10, "within 10 %"),
    Goal("ray_kill_errors", "==", 0, "but for connections of a front door that was killed"),
    Goal("ray_kill_cut", "==", 0, "but for streams of a decode instance that was killed"),
    Goal("ray_kill_held", "==", 0, "nothing is counted any more of what has ended"),
    Goal("ray_relayout_errors", "==", 0, "nobody notices a change"),
)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Part by part, on one cluster."""
    with ray_nodes() as ray:
        if "ready" in arguments.only:
            yield from starts(ray, arguments.starts)
        if "ttft" in arguments.only:
            yield from first_tokens(ray, arguments.rounds, arguments.per_s)
        if "kills" in arguments.only:
            yield from _kills(ray, arguments)
        if "relayout" in arguments.only:
            yield from _relayouts(ray, arguments)


def _kills(ray: RayNodes, arguments: argparse.Namespace) -> Iterator[Row]:
    plan = Plan("kills", KILL_S * arguments.kills, arguments.kills)

    def mend(victim: Victim) -> None:
        if victim.kind == RAYLET:
            ray.add()

    with on_ray(ray) as launch, commanded_on_ray(ray) as deployment:
        flows = simulated_flows(launch.model, plan.seconds, arguments.per_s)
        yield from killed(plan, launch.url, deployment, flows, lambda status: victims(ray, status), mend)


def _relayouts(ray: RayNodes, arguments: argparse.Namespace) -> Iterator[Row]:
    seconds = 60.0 * arguments.minutes
    with on_ray(ray) as launch, commanded_on_ray(ray) as deployment:
        flows = simulated_flows(launch.model, seconds, arguments.per_s)
        yield from walked("relayout", launch.url, deployment, flows, itertools.cycle(LAYOUTS), seconds)


def about(arguments: argparse.Namespace) -> dict[str, str]:
    return {"kind": "simulated stages; real processes, Ray and sockets: three nodes on one machine, no network between"}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Of each part that was measured."""
    parts = {part: own for (part,), own in grouped(rows, "part").items()}
    named: dict[str, float] = {}
    for (runtime,), own in grouped(parts.get("ready", ()), "runtime").items():
        named[f"{runtime}_ready_s"] = median(own, "seconds")
    runtimes = {runtime: own for (runtime,), own in grouped(parts.get("ttft", ()), "runtime").items()}
    if runtimes:
        named |= _first_tokens(runtimes)
    for (state,), own in grouped(parts.get("cpu", ()), "state").items():
        named["ray_cpu_share" if state == "loaded" else f"ray_cpu_share_{state}"] = median(own, "all")
    for part, name in (("kills", "ray_kill"), ("relayout", "ray_relayout")):
        total = next((row for row in parts.get(part, ()) if "requests" in row), None)
        if total is not None:
            named[f"{name}_requests"] = total["requests"]
            named[f"{name}_errors"] = total["errors"] + total["wrong"]
            named[f"{name}_cut"] = total["cut"]
    if "kills" in parts:
        named["ray_kills"] = sum("kill" in row for row in parts["kills"])
        named["ray_kill_held"] = sum(row.get("held", 0) for row in parts["kills"])
    if "relayout" in parts:
        changes = [row for row in parts["relayout"] if "state" in row or "refused" in row]
        failed = sum(row.get("state") != "done" for row in changes)
        named["ray_relayouts"] = len(changes)
        named["ray_relayout_errors"] = named.get("ray_relayout_errors", 0) + named.pop("ray_relayout_cut", 0) + failed
    return {name: round(value, 4) for name, value in named.items()}


def _first_tokens(runtimes: dict[str, list[Row]]) -> dict[str, float]:
    """Ratios round by round; of texts and images the worse one counts."""
    named: dict[str, float] = {"ray_ttft_failed": sum(row["failed"] for own in runtimes.values() for row in own)}
    each = []
    for kind in ("text", "image"):
        name = f"{kind}_ttft_ms"
        named |= {f"{runtime}_{name}": median(own, name) for runtime, own in runtimes.items()}
        if runtimes.keys() >= {LOCAL, RAY} and (found := ratios(runtimes[RAY], runtimes[LOCAL], name)) is not None:
            named |= quartiles(f"ray_{kind}_ttft_over_local", found)
            each.append(found.median)
    return named | ({"ray_ttft_over_local": max(each)} if each else {})


MEASUREMENT = Measurement(
    quick="one start, five rounds of turns, nine kills, fewer changes",
    measure=measure,
    figures=figures,
    flags=FLAGS,
    goals=GOALS,
    about=about,
)
add_arguments = MEASUREMENT.add_arguments
