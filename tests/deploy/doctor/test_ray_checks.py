"""Serving on several hosts: Ray, its token, a cluster, its nodes, and ports between them."""

from __future__ import annotations

import socket
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from deploy.doctor.check import Level
from deploy.doctor.command import examine
from deploy.doctor.facts import MEMORY_MONITOR, SUBREAPER, Facts, HostFacts, RayFacts
from deploy.doctor.gather import read_ray
from deploy.doctor.host_probe import HostProbe
from deploy.host.ports import free_ports
from deploy.options.versions import RAY
from tests.deploy.doctor.machines import CPU, found

HEADING = "Several hosts"
ROOT = Path(__file__).parents[3]
ONE, TWO = (
    HostFacts(
        f"10.0.0.{n}",
        f"10.0.0.{n}",
        versions={"epd-serve": "1", "vllm": "0.32.0"},
        free_ports=4000,
        settings={MEMORY_MONITOR: "0"},
    )
    for n in (1, 2)
)
ASKED = RayFacts(RAY, "~/.ray/auth_token", asked=True, address="10.0.0.1:6379", ports="20000-24999", hosts=(ONE, TWO))


def with_ray(ray: RayFacts, **environment: str) -> Facts:
    return replace(CPU, ray=ray, environment=environment or {"RAY_AUTH_MODE": "token"})


def test_where_all_is_well_every_line_is() -> None:
    findings = examine(with_ray(ASKED))[HEADING]
    assert {one.level for one in findings} == {Level.OK}
    assert [one.check for one in findings] == [
        "ray", "ray token", "ray cluster", "versions of the nodes", "ports of 10.0.0.1", "ports of 10.0.0.2"
    ]  # fmt: skip


def test_who_does_not_ask_for_several_hosts_is_told_the_version_and_no_more() -> None:
    for ray in (RayFacts(), RayFacts("2.41.0"), RayFacts(RAY)):
        (one,) = examine(with_ray(ray))[HEADING]
        assert one.level is (Level.WARNING if ray.version == "2.41.0" else Level.OK)


def test_nodes_that_would_not_know_each_other_are_named_with_the_file() -> None:
    one, two = (replace(host, secrets={"token": "aa", "tls.crt": "bb"}) for host in (ONE, TWO))
    assert not [
        each for each in examine(with_ray(replace(ASKED, hosts=(one, two))))[HEADING] if "secrets" in each.check
    ]
    other = replace(two, secrets={"token": "aa", "tls.crt": "cc"})
    told = found(with_ray(replace(ASKED, hosts=(one, other))), "tls.crt of --node-secrets")
    assert told.level is Level.ERROR and "10.0.0.1 bb, 10.0.0.2 cc" in told.seen and "copy tls.crt" in told.fix
    without = replace(TWO, no_secrets="--node-secrets /x: /x/token: No such file or directory")
    told = found(with_ray(replace(ASKED, hosts=(one, without))), "node secrets of 10.0.0.2")
    assert told.level is Level.ERROR and "/x/token" in told.seen


def test_a_missing_ray_is_an_error_where_it_is_asked_for() -> None:
    one = found(with_ray(RayFacts(asked=True)), "ray")
    assert one.level is Level.ERROR and "epd-serve[ray]" in one.fix


def test_the_extra_takes_the_version_that_is_pinned_and_that_the_doctor_wants() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (ray,) = map(Requirement, extras["ray"])
    assert ray.name == "ray" and ray.specifier.contains(RAY)
    assert f"\nray=={RAY}\n" in (ROOT / "requirements" / "ray.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("ray", "variables", "level"),
    [
        (ASKED, {"RAY_AUTH_MODE": "token"}, Level.OK),
        (ASKED, {"RAY_AUTH_MODE": "disabled"}, Level.ERROR),
        (ASKED, {"RAY_ADDRESS": "10.0.0.1:6379"}, Level.WARNING),
        (replace(ASKED, token=""), {"RAY_AUTH_MODE": "token"}, Level.ERROR),
        (replace(ASKED, token_is_open=True), {"RAY_AUTH_MODE": "token"}, Level.ERROR),
    ],
    ids=["on", "off", "not said", "no token", "a token for everybody"],
)
def test_authentication_has_to_be_on_and_its_token_a_secret(
    ray: RayFacts, variables: dict[str, str], level: Level
) -> None:
    one = found(with_ray(ray, **variables), "ray token")
    assert one.level is level
    assert level is Level.OK or "RAY_AUTH_MODE=token" in one.fix or "chmod 600" in one.fix


def test_a_cluster_that_does_not_answer_is_named_with_its_reason() -> None:
    one = found(with_ray(replace(ASKED, refusal="nobody listens there", hosts=())), "ray cluster")
    assert one.level is Level.ERROR and "10.0.0.1:6379: nobody listens there" in one.seen


def test_nodes_of_different_versions_are_told_apart_and_one_without_an_engine_is_none() -> None:
    older = replace(TWO, versions={"epd-serve": "1", "vllm": "0.23.0"})
    one = found(with_ray(replace(ASKED, hosts=(ONE, older))), "vllm of the nodes")
    assert one.level is Level.ERROR and one.seen == "10.0.0.1 0.32.0, 10.0.0.2 0.23.0"
    doors_only = replace(TWO, versions={"epd-serve": "1"})
    assert found(with_ray(replace(ASKED, hosts=(ONE, doors_only))), "versions of the nodes").level is Level.OK


@pytest.mark.parametrize(
    ("changed", "check", "level", "words"),
    [
        ({"refusal": "No module named 'deploy'"}, "node 10.0.0.2", Level.ERROR, "No module"),
        ({"free_ports": 3}, "ports of 10.0.0.2", Level.WARNING, "3 of 20000-24999"),
        ({"unheard": ("10.0.0.1",)}, "ports of 10.0.0.2", Level.ERROR, "not reached from 10.0.0.1"),
        ({"exposed": (15001, 15002)}, "open ports of 10.0.0.2", Level.WARNING, "15001, 15002"),
        ({"settings": {MEMORY_MONITOR: "0", SUBREAPER: "1"}}, "ray on 10.0.0.2", Level.ERROR, SUBREAPER),
        ({"niceness": 15}, "niceness of 10.0.0.2", Level.WARNING, "15"),
        ({"settings": {}}, "memory monitor of 10.0.0.2", Level.WARNING, "95 %"),
    ],
    ids=["nothing of ours", "few ports", "a firewall", "open ports", "subreaper", "nice workers", "memory monitor"],
)
def test_what_is_wrong_with_a_node_is_named(changed: dict[str, Any], check: str, level: Level, words: str) -> None:
    one = found(with_ray(replace(ASKED, hosts=(ONE, replace(TWO, **changed)))), check)
    assert one.level is level and words in one.seen


def test_a_token_is_found_where_ray_looks_for_it(tmp_path: Path) -> None:
    assert read_ray({}, tmp_path).token == ""
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.touch(mode=0o600)
    assert read_ray({}, tmp_path).token == "", "an empty one is none"
    file.write_text("word\n")
    assert (read_ray({}, tmp_path).token, read_ray({}, tmp_path).token_is_open) == (str(file), False)
    file.chmod(0o644)
    assert read_ray({}, tmp_path).token_is_open
    other = tmp_path / "other"
    assert read_ray({"RAY_AUTH_TOKEN_PATH": str(other)}, tmp_path).token == ""
    other.write_text("word")
    assert read_ray({"RAY_AUTH_TOKEN_PATH": str(other)}, tmp_path).token == str(other)
    assert read_ray({"RAY_AUTH_TOKEN": "word", "RAY_AUTH_TOKEN_PATH": "/none"}, tmp_path).token == "RAY_AUTH_TOKEN"


def test_a_node_listens_in_its_range_and_says_who_is_reached() -> None:
    (port,) = free_ports(1)
    only = range(port, port + 1)
    one, other = HostProbe("one", "127.0.0.1", only), HostProbe("other", "127.0.0.1", only)
    assert one.facts().free_ports == 1 and one.facts().versions["python"]
    assert one.listen() == port
    assert other.reaches("127.0.0.1", port)
    assert other.listen() == 0 and other.facts().free_ports == 0


def test_a_port_that_nobody_answers_at_is_not_reached_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.doctor.host_probe.REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full:
        address = full.getsockname()
        waiting = [socket.create_connection(address, 5) for _ in range(2)]  # its backlog is full: SYNs are dropped
        done: list[bool] = []
        asking = threading.Thread(target=lambda: done.append(HostProbe("one", "127.0.0.1", range(0)).reaches(*address)))
        asking.start()
        asking.join(30)
        assert done == [False]
        for one in waiting:
            one.close()
