"""Whole launches in a process of their own, with fake stages: what remains when they end, however they end."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.host.launches import reap_dead
from tests.deploy.launched import DEADLINE_S, FakeLaunch, children
from tests.waiting import wait_for


def test_a_launch_serves_and_ctrl_c_leaves_nothing(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", "--child")
    one.wait_ready()
    launch_id = one.run_path.name
    assert (Path("/dev/shm") / f"epd-{launch_id}-arena").exists()
    assert set(one.instances()) == {"E0", "P0", "D0"}
    assert len(one.members(launch_id)) == 7, "three stages, a child of each, a front door"
    out, err = one.end(signal.SIGINT)
    assert one.process.returncode == 0
    assert "Ready in" in out
    assert "curl -s http://127.0.0.1" in out
    assert "[E0] ready in" in err
    assert "serves although" not in err, "the stages reported that their KV links are up"
    one.assert_nothing_remains(launch_id)


@pytest.mark.slow
def test_a_launch_whose_kv_links_stay_down_is_ready_after_a_grace_and_names_the_link(
    launch: Callable[..., FakeLaunch],
) -> None:
    one = launch("P-D", "P0=--links=opening", "links_s=10")
    last = wait_for(
        lambda: next((row["id"] for row in one.instances().values() if "KV link" in row["reason"]), None),
        "one of the two waits for the link between them",
    )
    assert one.get("/health")[0] == 503
    one.wait_ready()
    out, err = one.end()
    assert f"{last} serves although KV link from P0 rank 0 to D0 rank 0 is opening" in err
    assert "Ready in" in out


@pytest.mark.slow
def test_a_stage_that_ignores_sigterm_is_killed(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("E-PD", "--ignore-term", "--child")
    one.wait_ready()
    launch_id = one.run_path.name
    one.end(signal.SIGTERM)
    one.assert_nothing_remains(launch_id)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("TP1", "--ignore-term")
    one.wait_ready()
    launch_id = one.run_path.name
    one.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    one.end(signal.SIGINT)
    one.assert_nothing_remains(launch_id)


def test_control_that_hangs_does_not_keep_a_third_ctrl_c_waiting(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("TP1", "--child", "--ignore-term")
    one.wait_ready()
    launch_id = one.run_path.name
    os.kill(next(pid for pid, name in children(one.pid).items() if name == "epd control"), signal.SIGSTOP)
    for _ in range(2):
        one.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    one.end(signal.SIGINT)
    assert one.process.returncode == 130
    one.assert_nothing_remains(launch_id)


@pytest.mark.slow
def test_ctrl_c_while_stages_start_leaves_nothing(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("E-PD", "--delay=60", "--child")
    wait_for(lambda: one.get("/health")[0] == 503, "the proxy answers while stages start")
    launch_id = one.run_path.name
    wait_for(lambda: len(one.members(launch_id)) == 5, "two stages, a child of each, a front door")
    out, err = one.end(signal.SIGINT)
    assert one.process.returncode == 0
    assert "Ready" not in out
    assert "Traceback" not in err
    one.assert_nothing_remains(launch_id)


def test_a_killed_stage_comes_back_with_a_new_incarnation_on_the_same_socket(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D")
    one.wait_ready()
    before = one.instances()["P0"]["incarnation"]
    pid = one.stage_pid("P0")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: one.instances()["P0"]["incarnation"] != before, "the proxy knows another life")
    wait_for(lambda: one.instances()["P0"]["up"], "P0 is back")
    assert one.stage_pid("P0") != pid
    assert one.instances()["D0"]["up"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_neighbour_that_dies_frees_its_cores_and_comes_back_to_them(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-PD)", "+core_share=E=0.5,PD=0.5")
    one.wait_ready()

    def ids(name: str) -> list[int]:
        (grant,) = one.instances()[name]["cores"]
        assert grant["enforced"] and sorted(os.sched_getaffinity(one.stage_pid(name))) == grant["ids"]
        return list(grant["ids"])

    mine, neighbours = ids("E0"), ids("PD0")
    assert mine and neighbours and not set(mine) & set(neighbours)
    before = one.instances()
    assert (before["E0"]["core_share"], before["PD0"]["core_share"]) == (0.5, 0.5)
    pid = one.stage_pid("E0")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: one.instances()["E0"]["incarnation"] != before["E0"]["incarnation"], "another life of E0")
    wait_for(lambda: one.instances()["E0"]["up"], "E0 is back")
    assert ids("E0") == mine and one.stage_pid("E0") != pid
    assert one.instances()["PD0"]["incarnation"] == before["PD0"]["incarnation"], "PD0 lives on"
    assert ids("PD0") == neighbours
    out, _ = one.end(signal.SIGINT)
    assert "E0: core" in out and "PD0: core" in out


def test_a_stage_that_fails_its_first_start_ends_the_launch_with_its_reason(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("E-P-D", "P0=--fail=no such dtype", "--child")
    _, err = one.process.communicate(timeout=DEADLINE_S)
    assert one.process.returncode == 1
    assert "epd-serve: stage P0 did not start: ValueError: no such dtype; its log: " in err
    assert "Traceback" not in err
    left = [path.name for path in one.root.iterdir()]
    assert left == ["last-failure-P0.log"]


def test_after_kill_9_of_the_launcher_the_next_start_cleans_up(launch: Callable[..., FakeLaunch]) -> None:
    first = launch("(E-P)-D", "--child")
    first.wait_ready()
    launch_id = first.run_path.name
    first.process.kill()
    first.process.wait()
    wait_for(lambda: len(first.members(launch_id)) == 3, "what stages have started outlives them, all else does not")
    second = launch("TP1", port=first.port)
    second.wait_ready()
    assert not first.members(launch_id)
    assert not list(Path("/dev/shm").glob(f"epd-{launch_id}-*"))
    assert second.run_path.name != launch_id
    _, err = second.end()
    assert f"cleaned up after launch {launch_id}" in err


@pytest.mark.slow
def test_a_living_launch_is_left_alone(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("TP1")
    one.wait_ready()
    assert reap_dead(one.root) == []
    assert one.get("/health")[0] == 200


def test_a_port_in_use_is_one_line(launch: Callable[..., FakeLaunch]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        one = launch("TP1", port=other.getsockname()[1])
        _, err = one.process.communicate(timeout=DEADLINE_S)
    assert one.process.returncode == 1
    assert f"{one.port} is in use" in err
    assert len(err.splitlines()) == 1
