"""Commands on a deployment on Ray, from processes that only know the cluster: changes under load, logs, its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.host.processes import stat
from deploy.memory.placement_table import short_node
from tests.deploy.ray.deployed import Deployed, deployed_on, load
from tests.deploy.ray.nodes import RayNodes
from tests.deploy.ray.on_ray import LAYOUT
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployed(cluster: RayNodes) -> Iterator[Deployed]:
    with deployed_on(cluster, LAYOUT) as found:
        yield found


def named(deployed: Deployed, role: str) -> list[str]:
    return sorted(one for one in deployed.lives if one.rstrip("0123456789") == role)


def test_relayouts_and_scaling_under_load_cost_nobody_anything(deployed: Deployed) -> None:
    with load(deployed) as found:
        cut = [deployed.changed("relayout", "(E-P)x2-2P-6D")["cut_requests"]]
        paired = [deployed.nodes[one] for one in named(deployed, "E")]
        prefill = [deployed.nodes[one] for one in named(deployed, "P")]
        cut += [deployed.changed("undo")["cut_requests"]]
        cut += [deployed.changed("scale", "E=3")["cut_requests"]]
        assert len(named(deployed, "E")) == 3
        cut += [deployed.changed("scale", "E=2,D=7")["cut_requests"]]
        assert (len(named(deployed, "E")), len(named(deployed, "D"))) == (2, 7)
    assert (found.errors, found.cut, cut) == ([], [], [0, 0, 0, 0])
    assert all(node in prefill for node in paired), "what parentheses hold is on one node"


def test_one_instance_or_all_front_doors_are_replaced_under_load(deployed: Deployed) -> None:
    with load(deployed) as found:
        drained, restarted = named(deployed, "D")[0], named(deployed, "P")[0]
        deployed.changed("drain", drained)
        deployed.changed("restart", restarted)
        deployed.command("restart", "front")
    assert (found.errors, found.cut) == ([], [])
    assert not {drained, restarted} & deployed.lives.keys()


def test_any_process_is_told_the_state_and_the_logs(deployed: Deployed) -> None:
    status = json.loads(deployed.command("status", "--json"))
    assert {one["id"] for one in status["instances"]} == deployed.lives.keys()
    rows = {line.split()[0]: line for line in deployed.command("status").splitlines() if line.strip()}
    assert all(f" {short_node(node)}:" in rows[name] for name, node in deployed.nodes.items())
    for name in named(deployed, "E"):
        assert deployed.command("logs", name).strip()


def test_down_leaves_nothing_on_any_node(cluster: RayNodes) -> None:
    """No process, no directory, no shared memory; and the cluster takes another deployment of the same name."""
    for _ in range(2):
        with deployed_on(cluster, "(E-P)x2-2D", "gone") as found:
            pids = found.processes()
            runs = [path for path in found.launch.run.iterdir() if path.is_dir()]
            assert len(set(found.nodes.values())) > 1 and len(runs) > 1, "it is on several nodes"
            found.command("down")
            wait_for(lambda pids=pids: not [pid for pid in pids if stat(pid) is not None], "its processes to go")
            assert not [path for path in runs if path.exists()]
            assert not [path for run in runs for path in Path("/dev/shm").glob(f"*epd-{run.name}-*")]
