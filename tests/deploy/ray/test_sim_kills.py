"""Whatever is killed of a deployment on Ray, clients notice nothing that need not be, and all is whole again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from bench.change.kills import Plan, Victim, killed
from bench.change.loads import simulated_flows
from deploy.host.processes import stat
from tests.deploy.ray.deployed import PER_S, SECONDS, Deployed, deployed_on, load
from tests.deploy.ray.nodes import RayNodes
from tests.deploy.ray.on_ray import LAYOUT, NODE, RAYLET, kind_of, node_of, victims
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
KEEPS_STAGES = ("controller", "node actor", "control", "front door")
ENDS_STAGES = ("stage", NODE, RAYLET)


@pytest.fixture(scope="module")
def deployed(cluster: RayNodes) -> Iterator[Deployed]:
    with deployed_on(cluster, LAYOUT) as found:
        yield found


@pytest.mark.parametrize("kind", [*KEEPS_STAGES, *ENDS_STAGES])
def test_nobody_notices_a_kill(deployed: Deployed, kind: str) -> None:
    """But clients of a front door that dies, and of streams whose decode instance does."""
    deployed.whole()
    before, nodes, dead = deployed.lives, deployed.nodes, list[Victim]()

    def of_this_kind(status: Mapping[str, Any]) -> list[Victim]:
        found = [one for one in victims(deployed.ray, status) if one.kind == kind]
        assert found, f"there is no {kind} to kill"
        return found

    def mend(victim: Victim) -> None:
        dead.append(victim)
        if kind == RAYLET:
            deployed.ray.add()

    flows = simulated_flows(deployed.launch.model, SECONDS, PER_S)
    plan = Plan(kind, SECONDS, count=1)
    rows = list(killed(plan, deployed.launch.url, deployed.deployment, flows, of_this_kind, mend))

    (total,) = (row for row in rows if "requests" in row)
    assert total["requests"] > 5 * PER_S, "there was load"
    assert [row for row in rows if "bad" in row] == []
    assert [row["held"] for row in rows if "held" in row] == [0]
    (victim,) = dead
    lost = {victim.name} if kind == "stage" else {one for one in nodes if nodes[one] == victim.name.split("/")[0]}
    after = deployed.lives
    started_again = {one for one in before if after.get(one) != before[one]}
    assert started_again == (lost if kind in ENDS_STAGES else set())


def test_a_node_that_is_not_replaced_has_its_instances_on_others(deployed: Deployed) -> None:
    deployed.whole()
    (victim, *_) = (one for one in victims(deployed.ray, deployed.deployment.status()) if one.kind == RAYLET)
    assert victim.name in deployed.nodes.values()
    deployed.ray.lose(next(one for one in deployed.ray.nodes if one.raylet_pid == victim.pid))
    wait_for(lambda: victim.name not in deployed.nodes.values(), "its instances to be elsewhere")
    deployed.whole()
    assert len(deployed.lives) == 12
    deployed.ray.add()


def test_a_raylet_that_hangs_is_replaced_as_one_that_died_and_its_node_ends_when_it_wakes(deployed: Deployed) -> None:
    deployed.whole()
    (victim, *_) = (one for one in victims(deployed.ray, deployed.deployment.status()) if one.kind == RAYLET)
    left = [pid for name, pid in _node_processes(deployed).items() if name == victim.name]
    with load(deployed) as found:
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            deployed.ray.add()
            wait_for(lambda: victim.name not in deployed.nodes.values(), "its instances to be elsewhere")
            deployed.whole()
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        wait_for(lambda: not [pid for pid in left if stat(pid) is not None], "what ran there to end")
    assert (found.errors, found.cut) == ([], [])


def _node_processes(deployed: Deployed) -> dict[str, int]:
    parts = deployed.deployment.status()["parts"]
    return {node_of(name): one["pid"] for name, one in parts.items() if kind_of(name) == NODE}
