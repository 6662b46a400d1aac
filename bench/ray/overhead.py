"""What Ray costs a deployment that one machine could run: its start, its time to first token, its own processes.

The same layout, once under the local runtime and once on three nodes of a cluster, which share this machine: both are
up, and are asked in turns. So whatever a second launch and Ray take from the first, they take from both; how much that
is, the share of a core says that Ray's processes take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench.change.loads import PROFILE, simulated_flows
from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.micro.measurement import in_turns
from bench.ray.deployed import FLAGS, LAYOUT, on_ray
from bench.ray.nodes import RayNodes
from bench.served import Served, simulated
from deploy.agent.cpu_time import cpu_seconds, since

LOCAL, RAY = "local", "ray"
TURN_S, IDLE_S, SETTLE_S = 8.0, 5.0, 3.0
LIMIT_S = 60.0

Row = dict[str, Any]


def starts(ray: RayNodes, rounds: int) -> Iterator[Row]:
    """From the start of `epd-serve serve` to its ready message; the cluster is there."""
    for turn, runtime in in_turns((LOCAL, RAY), rounds):
        with simulated(LAYOUT, PROFILE, FLAGS) if runtime == LOCAL else on_ray(ray) as launch:
            yield {"part": "ready", "runtime": runtime, "round": turn, "seconds": round(launch.ready_s, 3)}


def first_tokens(ray: RayNodes, rounds: int, per_s: float) -> Iterator[Row]:
    """Each turn a row of its requests; of those on Ray also the shares of a core that its processes took, then idle."""
    with simulated(LAYOUT, PROFILE, FLAGS) as local, on_ray(ray) as far, SenderProcess() as sender:
        launches = {LOCAL: local, RAY: far}
        for launch in launches.values():  # connections, first-time imports
            _asked(sender, launch, per_s, SETTLE_S)
        for turn, runtime in in_turns([*launches], rounds, shown="turns"):
            spent = _Spent(ray)
            rows = _asked(sender, launches[runtime], per_s, TURN_S)
            shares = spent.shares()
            yield {"part": "ttft", "runtime": runtime, "round": turn, **_of(rows)}
            if runtime == RAY:
                yield {"part": "cpu", "state": "loaded", "round": turn, **shares}
                idle = _Spent(ray)
                time.sleep(IDLE_S)
                yield {"part": "cpu", "state": "idle", "round": turn, **idle.shares()}


def _asked(sender: SenderProcess, launch: Served, per_s: float, seconds: float) -> list[RequestRecord]:
    flows = simulated_flows(launch.model, seconds, per_s, streams=1)
    return sender.run(launch.url, *flows, limit_s=LIMIT_S, decode=True).rows


def _of(rows: list[RequestRecord]) -> Row:
    """Time to first token of those that were answered; texts and images apart."""
    found: Row = {"requests": len(rows), "failed": sum(not one.ok for one in rows)}
    for kind in ("text", "image"):
        taken = [one.ttft_s for one in rows if one.ok and one.kind == kind and one.ttft_s is not None]
        found[f"{kind}_ttft_ms"] = round(float(np.median(taken)) * 1e3, 3)
    return found


class _Spent:
    """Shares of a core that Ray's own processes take from now on, those of `actors` (ours, run by Ray) among them."""

    def __init__(self, ray: RayNodes) -> None:
        self._parts = ray.parts()
        self._begun, self._before = time.perf_counter(), cpu_seconds(self._parts)

    def shares(self) -> Mapping[str, float]:
        wall_s = time.perf_counter() - self._begun
        spent = since(self._before, cpu_seconds(self._parts))
        return {
            **{part: round(own / wall_s, 4) for part, own in spent.items()},
            "all": round(sum(spent.values()) / wall_s, 4),
        }
