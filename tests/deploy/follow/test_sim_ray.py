"""The load is followed on a Ray cluster whose own autoscaler starts nodes for what waits, and takes idle ones away."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from bench.change.loads import judged
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.served import simulated
from bench.workloads.requests import Poisson, arrivals_within
from bench.workloads.synthetic import text_body
from deploy.planner.profile import DeviceProfile
from epd_serve.sim.profile import Line, Profile
from tests.deploy.ray.nodes import Autoscaled, RayNodes, ray_nodes
from tests.deploy.ray.on_ray import NAME, commanded_on_ray
from tests.e2e.serving import Endpoint
from tests.waiting import wait_for

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow

DEVICE = DeviceProfile("m", "d", {1: Profile(prefill=Line(0.0, 0.005), decode_step_s=((1, 0.01), (64, 0.02)))})
TOKENS, ANSWER, PER_S, SECONDS = 64, 8, 4.5, 150.0
"""Prompts keep one device busy for 1.4 of its time; two serve them, and three are wanted. `SECONDS`: at most."""
RAY = ("--runtime", "ray", "--name", NAME, "--drain-s", "10", "--lame-duck-s", "0")
FOLLOW = ("--follow", "act", "--follow-devices", "4", "--follow-every-s", "1", "--follow-quiet-s", "10")
RESERVED = """
import json, ray
from ray.util.placement_group import placement_group_table
ray.init(log_to_driver=False, logging_level="ERROR")
rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED"]
print(json.dumps([[row["name"].split("/")[2], row["state"]] for row in rows]))
"""


def reserved(ray: RayNodes) -> list[list[str]]:
    """What is `lease` or `wanted`, and whether it is there, of all that is reserved on the cluster."""
    done = subprocess.run([sys.executable, "-c", RESERVED], env=ray.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(done.stdout.splitlines()[-1]))


def flow(model: str) -> Flow:
    dues = arrivals_within(Poisson(PER_S), SECONDS, 1)
    turns = range(len(dues))
    bodies = [text_body(model, tokens=TOKENS, answer=ANSWER, stream=turn % 2 == 1, seed=turn) for turn in turns]
    return Flow([Request.of(body) for body in bodies], "text", dues=dues)


def test_a_node_comes_for_the_load_and_goes_with_it_and_one_that_never_comes_is_not_waited_for() -> None:
    """Two devices, a third one that the autoscaler may add, and a fourth that it may not."""
    with ray_nodes(1, cpus=2, autoscaled=Autoscaled(cpus=1, most=1, idle_s=5.0)) as ray:
        profile = msgspec.to_builtins(DEVICE, str_keys=True)
        with (
            simulated("P-D", profile, [*RAY, *FOLLOW], ray.environment) as launch,
            commanded_on_ray(ray) as deployment,
            SenderProcess() as sender,
        ):

            def layouts() -> list[str]:
                return list(deployment.status()["layouts"])

            def raylets() -> int:
                return len(ray.parts()["raylet"])

            def answered() -> float:
                return Endpoint(launch.url).metric("epd_proxy_requests_total")

            assert reserved(ray) == [["lease", "CREATED"]] * 2 and raylets() == 1
            sender.start(launch.url, flow(launch.model), limit_s=60.0, decode=True)
            wait_for(lambda: layouts()[-1] == "2P-D", "the node to be used")
            deployment.whole(60.0)
            homes = {one["id"]: one["node"] for one in deployment.status()["instances"]}
            assert raylets() == 2 and homes["P1"] != homes["P0"] == homes["D0"]
            waits = [["lease", "CREATED"]] * 3 + [["wanted", "PENDING"]]
            wait_for(lambda: reserved(ray) == waits, "what there is no node for to be asked for")
            before = answered()
            wait_for(lambda: answered() > before + 5 * PER_S, "requests beside what waits")

            sender.enough()
            found = judged(sender.finish().rows)
            assert found.requests > 10 * PER_S and (found.errors, found.cut) == ([], [])
            wait_for(lambda: layouts()[-1] == "P-D", "what came to be given up")
            deployment.whole(60.0)
            wait_for(lambda: reserved(ray) == [["lease", "CREATED"]] * 2, "all else to be Ray's again")
            wait_for(lambda: raylets() == 1, "the node to be taken away")
            wait_for(lambda: len(deployment.status()["nodes"]) == 1, "the deployment to know")
            assert layouts() == ["P-D", "2P-D", "P-D"]
            moves = [one["outcome"] for one in deployment.decisions() if one["chosen"] is not None]
            assert moves == ["done", "done"]
