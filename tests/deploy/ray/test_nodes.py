"""Nodes of a Ray cluster on this machine: that they come, go and end with whoever has started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from bench.record import ROOT
from deploy.host.processes import stat
from tests.deploy.ray.nodes import RayNodes, ray_nodes
from tests.waiting import wait_for

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow
MEASURES = """
import sys
from tests.deploy.ray.nodes import ray_nodes
if __name__ == "__main__":
    with ray_nodes(2, cpus=1) as ray:
        print(*(pid for pids in ray.parts().values() for pid in pids), flush=True)
        sys.stdin.read()
"""


def pids(ray: RayNodes) -> set[int]:
    return {pid for found in ray.parts().values() for pid in found}


def runs(pid: int) -> bool:
    found = stat(pid)
    return found is not None and not found.dead


def test_a_node_whose_raylet_is_killed_is_none_and_another_may_come() -> None:
    with ray_nodes(2, cpus=1) as ray:
        assert len(ray.nodes) == 2 and len(ray.parts()["raylet"]) == 2 and len(ray.parts()["gcs"]) == 1
        assert ray.parts()["actors"] == (), "nobody has any yet"
        lost = ray.nodes[1]
        ray.lose(lost)
        wait_for(lambda: lost not in ray.nodes, "it to end")
        added = ray.add(num_cpus=2)
        assert ray.nodes[1:] == (added,) and added.id != lost.id
        every = pids(ray)
    wait_for(lambda: not [pid for pid in every if runs(pid)], "all of it to end")


def test_nothing_of_ray_outlives_a_measurement_that_is_killed(tmp_path) -> None:
    script = tmp_path / "measures.py"
    script.write_text(MEASURES)
    argv, env = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        every = [int(pid) for pid in process.stdout.readline().split()]
        assert len(every) > 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not [pid for pid in every if runs(pid)], "all of it to end")
