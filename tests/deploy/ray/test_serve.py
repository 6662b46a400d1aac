"""`epd-serve serve --runtime ray` on three nodes, with simulated stages: begun, asked, changed, ended from anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.host.ports import free_ports
from deploy.ray.cluster import deployments
from tests.deploy.client_keys import client_keys
from tests.deploy.launch.test_sim_launch import profile_file
from tests.deploy.ray.nodes import RayNodes, ray_nodes
from tests.waiting import wait_for

ASKED = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Served:
    """A deployment that `epd-serve serve` has begun."""

    def __init__(self, cluster: RayNodes, folder: Path, name: str, layout: str, *flags: str) -> None:
        self.cluster, self.name = cluster, name
        (self.port,) = free_ports(1)
        self.said = folder / f"{name}.log"
        words = ["serve", "--runtime", "ray", "--engine", "sim", "--layout", layout, "--name", name]
        words += ["--fronts", "here", "--port", str(self.port), "--run-root", str(folder / "run")]
        words += ["--sim-profile", profile_file(folder), "--arena-mib", "32", *flags]
        with self.said.open("wb") as log:
            self.process = subprocess.Popen(_command(words), stdout=log, stderr=log, env=cluster.environment)

    def wait_ready(self) -> None:
        wait_for(lambda: "Ready in" in self.said.read_text() or self.process.poll() is not None, "ready")
        assert "Ready in" in self.said.read_text(), self.said.read_text()

    def answers(self) -> bool:
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=ASKED, timeout=60)
        return answer.status_code == 200 and bool(answer.json()["choices"][0]["message"]["content"])

    def says_to(self, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"http://127.0.0.1:{self.port}/v1/models", headers=headers, timeout=60).status_code

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another command about it."""
        return run(self.cluster, words[0], "--ray", "--name", self.name, *words[1:])

    def status(self) -> dict[str, Any]:
        told = self.run("status", "--json")
        assert told.returncode == 0, told.stderr
        status: dict[str, Any] = json.loads(told.stdout)
        return status

    def controller(self) -> int | None:
        """Its pid, as soon as one answers."""
        told = self.run("status", "--json")
        return json.loads(told.stdout)["parts"]["controller"]["pid"] if told.returncode == 0 else None


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", *words]


def run(cluster: RayNodes, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(list(words)), env=cluster.environment, capture_output=True, text=True, timeout=120)


@contextmanager
def served(cluster: RayNodes, folder: Path, name: str, layout: str, *flags: str) -> Iterator[Served]:
    one = Served(cluster, folder, name, layout, *flags)
    try:
        one.wait_ready()
        yield one
    finally:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGINT)
        elif "--detach" in flags:
            one.run("down", "--now")
        one.process.wait(60)


def waits_for(pid: int, number: signal.Signals) -> bool:
    """Whether the process has not heard this signal yet: another one of its kind would be the same."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
    return bool(int(pending, 16) >> (number - 1) & 1)


def assert_nothing_is_left(connected: RayNodes, folder: Path, name: str) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    def left() -> list[Any]:
        named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
        found = [one for one in [*named, *groups] if one.startswith(f"epd-serve/{name}")]
        return [*found, *(folder / "run").glob("*")]

    try:
        wait_for(lambda: not left(), "nothing to be left")
    finally:
        assert not left()


@pytest.mark.slow
def test_a_layout_is_served_by_three_nodes_changed_and_ended_without_a_trace(
    connected: RayNodes, tmp_path: Path
) -> None:
    with served(connected, tmp_path, "three", "E-P-D", "--placement", "spread") as one:
        assert one.answers()
        status = one.status()
        assert status["layout"] == "E-P-D" and status["state"] == "steady"
        assert len({instance["node"] for instance in status["instances"]}) == 3
        there = status["parts"]
        assert {"controller"} | {
            f"{node}/{part}"
            for node in {row["node"] for row in status["instances"]}
            for part in ("actor", "node", "control")
        } <= set(there)

        changed = one.run("relayout", "E-P-2D")
        assert changed.returncode == 0, changed.stderr
        assert len(one.status()["instances"]) == 4 and one.answers()

        listed = json.loads(one.run("why", "--json").stdout)["requests"]
        assert [request["path"] for request in listed] == ["P-D", "P-D"]
        why, top = one.run("why", listed[0]["id"]), one.run("top", "--once")
        assert listed[0]["id"] in why.stdout and "P0" in why.stdout, why.stderr
        assert {"E0", "P0", "D0", "D1"} <= {line.split()[0] for line in top.stdout.splitlines() if line}, top.stderr

        logs = one.run("logs", "P0")
        assert logs.returncode == 0 and logs.stdout

        again = run(connected, *one.process.args[3:])
        assert again.returncode == 2 and "--name" in again.stderr
    assert one.process.returncode == 0
    assert_nothing_is_left(connected, tmp_path, "three")


@pytest.mark.slow
def test_front_doors_of_a_cluster_go_by_the_keys_as_their_file_has_them_now(
    connected: RayNodes, tmp_path: Path
) -> None:
    keys = client_keys(tmp_path / "keys", "one")
    with served(connected, tmp_path, "keyed", "PD", "--detach", "--api-key-file", keys) as one:
        assert (one.says_to("one"), one.says_to("two")) == (200, 401)
        client_keys(tmp_path / "keys", "two")
        wait_for(lambda: one.says_to("two") == 200, "the new key")
        assert one.says_to("one") == 401
        (tmp_path / "keys").write_text("broken")
        os.kill(one.status()["parts"]["controller"]["pid"], signal.SIGKILL)
        wait_for(lambda: one.status()["state"] == "steady", "the next controller")
        client_keys(tmp_path / "keys", "three")
        wait_for(lambda: one.says_to("three") == 200, "the next key")
        assert one.says_to("two") == 401


@pytest.mark.slow
def test_a_cluster_that_wants_no_token_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with ray_nodes(1, cpus=2, token=False) as open_cluster:
        one = Served(open_cluster, tmp_path, "open", "EPD")
        wait_for(lambda: one.process.poll() is not None or "Ready in" in one.said.read_text(), "its refusal")
        said = one.said.read_text()
        assert one.process.poll() == 2 and "RAY_AUTH_MODE=token" in said and "get-auth-token" in said, said


@pytest.mark.slow
def test_a_detached_one_goes_on_without_who_began_it_until_down(connected: RayNodes, tmp_path: Path) -> None:
    with served(connected, tmp_path, "alone", "E-PD", "--detach") as one:
        assert one.process.wait(30) == 0
        assert one.answers()
        ended = one.run("down")
        assert ended.returncode == 0, ended.stderr
        with pytest.raises(httpx.TransportError):
            one.answers()
    assert_nothing_is_left(connected, tmp_path, "alone")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_one_that_is_hardly_begun(connected: RayNodes, tmp_path: Path, number: signal.Signals) -> None:
    one = Served(connected, tmp_path, number.name.lower(), "E-PD")
    wait_for(lambda: one.name in deployments(), "its controller, which is told a second later what it is for")
    one.process.send_signal(number)
    assert one.process.wait(60) == 0, one.said.read_text()
    assert_nothing_is_left(connected, tmp_path, one.name)


@pytest.mark.slow
@pytest.mark.parametrize("mute", [False, True], ids=["answers", "does not answer"])
def test_the_third_signal_leaves_a_controller_that_ends_all_even_if_it_does_not_answer(
    connected: RayNodes, tmp_path: Path, mute: bool
) -> None:
    with served(connected, tmp_path, "mute", "E-PD") as one:
        controller = one.status()["parts"]["controller"]["pid"]
        if mute:
            os.kill(controller, signal.SIGSTOP)
        for _ in range(3):
            one.process.send_signal(signal.SIGINT)
            wait_for(lambda: not waits_for(one.process.pid, signal.SIGINT), "it to be heard")
        assert one.process.wait(30) == 130
        assert not mute or "told to end it" in one.said.read_text()
        assert_nothing_is_left(connected, tmp_path, "mute")


@pytest.mark.slow
def test_a_node_that_cannot_be_used_has_nothing_of_ours_and_keeps_no_controller_from_beginning(tmp_path: Path) -> None:
    """Of two nodes of one machine one can have front doors at a port. One actor, and the controller."""
    with ray_nodes(1, cpus=2) as machine, served(machine, tmp_path, "full", "PD", "--fronts", "every") as one:
        machine.add()
        wait_for(lambda: "is left out" in one.said.read_text(), "it to be left out")
        wait_for(lambda: len(machine.parts()["actors"]) == 2, "its actor to go")
        before = one.controller()
        assert before
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: one.controller() not in (None, before), "the next controller")
        assert one.answers() and one.status()["state"] == "steady"
        assert len(machine.parts()["actors"]) == 2 and one.said.read_text().count("is left out") == 1


@pytest.mark.slow
def test_a_command_on_a_cluster_dies_of_sigterm(connected: RayNodes, tmp_path: Path) -> None:
    with served(connected, tmp_path, "followed", "EPD") as one:
        words = _command(["logs", "EPD0", "-f", "--ray", "--name", one.name])
        with subprocess.Popen(words, env=connected.environment, stdout=subprocess.PIPE) as follower:
            assert follower.stdout is not None and follower.stdout.readline()
            follower.terminate()
            assert follower.wait(30) == -signal.SIGTERM


@pytest.mark.slow
def test_what_no_cluster_has_is_refused_and_nothing_is_left(connected: RayNodes, tmp_path: Path) -> None:
    one = Served(connected, tmp_path, "greedy", "E-P-40D")
    assert one.process.wait(120) == 2
    assert "42" in one.said.read_text() and "Traceback" not in one.said.read_text()
    assert_nothing_is_left(connected, tmp_path, "greedy")


@pytest.mark.parametrize(
    "words",
    [["status"], *(pytest.param(words, marks=pytest.mark.slow) for words in (["down"], ["logs"], ["undo"]))],
    ids=lambda words: words[0],
)
def test_a_deployment_that_does_not_run_is_named_and_refused(connected: RayNodes, words: list[str]) -> None:
    refused = run(connected, words[0], "--ray", "--name", "nobody", *words[1:])
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_a_cluster_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    asked = ["serve", "--runtime", "ray", "--engine", "sim", "--ray-address", "127.0.0.1:1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    refused = subprocess.run(_command(asked), env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("epd-serve: ")  # after what Ray's library itself has to say
