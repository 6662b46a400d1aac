"""What clients notice of kills and of changes of a deployment on Ray: twelve simulated stages over three nodes.

The nodes are of one cluster on this machine. SIGKILL, one after another, of raylets, the controller, actors, processes
and front doors of nodes, and stages; then from one layout to another.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

from bench.change.kills import Plan, Victim, killed
from bench.change.loads import simulated_flows
from bench.change.walk import walked
from bench.micro.measurement import Goal
from tests.deploy.ray.nodes import RayNodes, ray_nodes
from tests.deploy.ray.on_ray import LAYOUT, RAYLET, commanded_on_ray, on_ray, victims
from tests.soak.harness import Result, Soak

PER_S = 20.0
LAYOUTS = ("3E-4P-5D", "(E-P)x2-2P-6D", "2E-6P-4D", LAYOUT)
KILL_S = 40.0
"""That the next kill takes at most, by experience: a node that is lost is added again."""

Row = dict[str, Any]


def measure(arguments: argparse.Namespace) -> Result:
    kills, seconds = (9, 90.0) if arguments.quick else (27, 300.0)
    with ray_nodes() as ray, on_ray(ray) as launch:
        rows = [*_kills(ray, launch.url, launch.model, kills), *_relayouts(ray, launch.url, launch.model, seconds)]
    return figures(rows), rows, "\n".join(f"{row['at']:8.1f} s  {row['kind']}" for row in rows if "kill" in row)


def _kills(ray: RayNodes, url: str, model: str, count: int) -> Iterator[Row]:
    plan = Plan("kills", KILL_S * count, count)

    def mend(victim: Victim) -> None:
        if victim.kind == RAYLET:
            ray.add()

    with commanded_on_ray(ray) as deployment:
        flows = simulated_flows(model, plan.seconds, PER_S)
        yield from killed(plan, url, deployment, flows, lambda status: victims(ray, status), mend)


def _relayouts(ray: RayNodes, url: str, model: str, seconds: float) -> Iterator[Row]:
    with commanded_on_ray(ray) as deployment:
        flows = simulated_flows(model, seconds, PER_S)
        yield from walked("relayout", url, deployment, flows, itertools.cycle(LAYOUTS), seconds)


def figures(rows: list[Row]) -> dict[str, float]:
    """Of clients and of changes; a change that failed or was refused is an error."""
    of_kills, of_changes = (
        next(row for row in rows if row["part"] == part and "requests" in row) for part in ("kills", "relayout")
    )
    changes = [row for row in rows if row["part"] == "relayout" and ("state" in row or "refused" in row)]
    failed = sum(row.get("state") != "done" for row in changes)
    return {
        "ray_kills": sum("kill" in row for row in rows),
        "ray_kill_requests": of_kills["requests"],
        "ray_kill_errors": of_kills["errors"] + of_kills["wrong"],
        "ray_kill_cut": of_kills["cut"],
        "ray_kill_held": sum(row.get("held", 0) for row in rows),
        "ray_relayouts": len(changes),
        "ray_relayout_requests": of_changes["requests"],
        "ray_relayout_errors": sum(of_changes[name] for name in ("errors", "wrong", "cut")) + failed,
    }


SOAK = Soak(
    "ray_kills",
    "clients' errors while nodes, control processes and stages on Ray are killed, and layouts change",
    measure,
    (
        Goal("ray_kill_errors", "==", 0, "but for connections of a front door that was killed"),
        Goal("ray_kill_cut", "==", 0, "but for streams of a decode instance that was killed"),
        Goal("ray_kill_held", "==", 0, "nothing is counted any more of what has ended"),
        Goal("ray_relayout_errors", "==", 0, "nobody notices a change"),
    ),
)


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
