"""`epd-serve doctor --ray` before a cluster of three nodes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor.facts import RayFacts
from deploy.ray import doctor
from tests.deploy.ray.nodes import RayNodes
from tests.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[3]
PORTS = "23000-23499"


def examined(cluster: RayNodes, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and what it says of several hosts by check."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "deploy.cli", "doctor", "--ray", "--device", "cpu", "--json"]
    done = subprocess.run(
        [*command, "--ray-address", cluster.address, "--node-ports", PORTS],
        env={**cluster.environment, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stderr
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {one["check"]: one for one in findings if one["heading"] == "Several hosts"}


def test_every_node_is_asked_for_its_versions_and_whom_it_reaches(cluster: RayNodes) -> None:
    code, found = examined(cluster)
    assert {name: one["level"] for name, one in found.items()} == {
        "ray": "ok",
        "ray token": "ok",
        "ray cluster": "ok",
        "versions of the nodes": "ok",
        **{f"ports of {node.id[:8]}": "ok" for node in cluster.nodes},
    }
    assert f"equal on {len(cluster.nodes)}" in found["versions of the nodes"]["seen"]
    assert code == 0


@pytest.mark.slow
def test_who_has_another_token_is_told_so_and_no_node_is_asked(cluster: RayNodes) -> None:
    code, found = examined(cluster, RAY_AUTH_TOKEN="0" * 64)
    assert code == 1 and found["ray cluster"]["level"] == "error"
    assert not any(name.startswith("ports of") for name in found)


@pytest.mark.slow
def test_every_node_is_asked_for_what_makes_it_a_member(cluster: RayNodes) -> None:
    code, found = examined(cluster, EPD_NODE_SECRETS="/nowhere")
    names = [f"node secrets of {node.id[:8]}" for node in cluster.nodes]
    assert code == 1 and {found[name]["level"] for name in names} == {"error"}
    assert all("/nowhere/tls.key" in found[name]["seen"] and "token" in found[name]["fix"] for name in names)


def test_a_cluster_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ASK_S", 0.2)  # importing Ray alone takes longer
    told = doctor.ask_cluster("192.0.2.1:6379", PORTS, "", RayFacts())
    assert told.asked and "within 0.2 s" in told.refusal
    assert "doctor" not in {one.name for one in multiprocessing.active_children()}


def test_what_ray_prints_of_its_cluster_is_not_taken_for_findings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray writes to standard output that a node has died, whenever it hears of it (`listen_error_messages`)."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    monkeypatch.setattr(doctor, "connect", lambda address: print("The node with node id: 8476 has died"))
    monkeypatch.setattr(doctor, "require_token", lambda: None)
    monkeypatch.setattr(doctor, "nodes_alive", list)
    doctor._ask(writer, "192.0.2.1:6379", "", RayFacts(ports=PORTS))
    assert reader.poll(0) and reader.recv().hosts == ()
    said = capfd.readouterr()
    assert said.out == "" and "has died" in said.err
