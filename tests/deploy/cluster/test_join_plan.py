"""What a joined stage is made of, before its head has said a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deploy.cluster.join_plan import JoinPlan, address_of, check_passed, processing_text
from deploy.host.rundir import RunDir
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.plan.machines import Machine, Machines
from epd_serve.cluster import ClusterSettings, JoinAnswer
from epd_serve.engine.argv import stage_command
from epd_serve.errors import ConfigError
from epd_serve.peers import Peers, write_peers
from epd_serve.roles import Role

TOLD = ClusterSettings("served", "tcp://h:1", "tcp://h:2", "h:3", mooncake_protocol="rdma", feature_path="auto")
RUN = RunDir("abcd", Path("/run/abcd"), Path("/dev/shm"))


def plan(role: Role, *passed: str, tp: int = 1) -> JoinPlan:
    blueprint = draw(DeployConfig(layout=f"TP{tp}", device="cpu"))
    return JoinPlan(blueprint, role, "10.0.0.9", 8001, "", 8, 16, passed)


def test_ports_are_neighbours_one_for_prefill_one_per_rank_for_decode() -> None:
    assert list(plan(Role.E).ports) == [8001]
    assert list(plan(Role.PD).ports) == [8001]
    assert list(plan(Role.P, tp=2).ports) == [8001, 8002]
    assert list(plan(Role.D, tp=2).ports) == [8001, 8002, 8003]


@pytest.mark.parametrize(
    ("role", "kv_endpoint", "kv_workers"),
    [(Role.E, "", ""), (Role.P, "tcp://10.0.0.9:8002", ""), (Role.D, "", "tcp://10.0.0.9:8002+{rank}")],
)
def test_the_head_hears_the_addresses_that_the_stage_binds(role: Role, kv_endpoint: str, kv_workers: str) -> None:
    made = plan(role)
    asked = made.request("agent", "", "")
    wired = made.wiring(JoinAnswer("X7", TOLD), RUN, "life")
    assert (asked.kv_endpoint, asked.kv_workers) == (wired.kv_endpoint, wired.kv_worker_endpoint)
    assert (wired.kv_endpoint, wired.kv_worker_endpoint) == (kv_endpoint, kv_workers)
    assert asked.url == "http://10.0.0.9:8001"
    assert asked.revision


def test_features_concern_encoders_and_those_who_take_theirs() -> None:
    e, p, epd = (plan(role).wiring(JoinAnswer("X", TOLD), RUN, "life") for role in (Role.E, Role.P, Role.EPD))
    assert (e.publish, e.mooncake_master, e.mooncake_segment_bytes) == ("tcp://h:1", "h:3", 16 << 20)
    assert (p.publish, p.mooncake_segment_bytes) == ("tcp://h:1", 0)
    assert p.arena == "/dev/shm/epd-abcd-arena" and p.arena_id == "abcd"
    assert (epd.arena, epd.publish, epd.mooncake_master) == ("", "", "")


def test_a_stage_hears_the_bus_and_opens_links_to_those_who_took_kv_when_it_joined(tmp_path: Path) -> None:
    made, run = plan(Role.P), RunDir("abcd", tmp_path, tmp_path)
    answer = JoinAnswer("P0", TOLD, kv_peers=[("tcp://d:1", "tcp://d:2")])
    write_peers(run.peers, made.peers(answer))
    peers = Peers(made.wiring(answer, run, "life"))
    assert peers.changed()
    assert (peers.encoders(), peers.takers_of_kv()) == ({TOLD.events_listen}, [("tcp://d:1", "tcp://d:2")])
    assert peers.may_be_at("tcp://joined-later:1")


@pytest.mark.parametrize("role", [Role.E, Role.P, Role.D, Role.EP, Role.PD, Role.EPD])
def test_every_role_reports_its_load_on_the_bus(role: Role) -> None:
    wired = plan(role).wiring(JoinAnswer("X7", TOLD), RUN, "life")
    assert (wired.load_publish, wired.publish_by_connecting) == ("tcp://h:1", True)


@pytest.mark.parametrize("role", [Role.P, Role.EP])
def test_those_who_send_kv_report_their_links_on_the_bus(role: Role) -> None:
    wired = plan(role).wiring(JoinAnswer("X7", TOLD), RUN, "life")
    assert (wired.kv_publish, wired.publish_by_connecting, wired.traffic) == ("tcp://h:1", True, "/run/abcd/X7.traffic")
    assert plan(Role.D).wiring(JoinAnswer("D0", TOLD), RUN, "life").kv_publish == ""


def test_npus_use_their_own_protocol_and_features_go_into_device_memory_unless_the_head_says_host() -> None:
    made = plan(Role.P)
    machines = Machines((Machine("local", replace(made.blueprint.inventory, kind="npu"), ()),))
    npu = replace(made, blueprint=replace(made.blueprint, machines=machines))
    wired = npu.wiring(JoinAnswer("P0", TOLD), RUN, "life")
    assert (wired.mooncake_protocol, wired.feature_path) == ("ascend", "device")
    assert wired.feature_worker_endpoint == "ipc:///run/abcd/P0.features{rank}"
    for told in (replace_told(feature_path="host"), replace_told(mooncake_master="")):
        assert npu.wiring(JoinAnswer("P0", told), RUN, "life").feature_path == "host"
    assert made.wiring(JoinAnswer("P0", TOLD), RUN, "life").mooncake_protocol == "rdma"


def replace_told(**changes: str) -> ClusterSettings:
    import msgspec

    return msgspec.structs.replace(TOLD, **changes)


def test_the_server_is_guarded_serves_the_clusters_name_and_no_key_is_in_its_command() -> None:
    command = stage_command(plan(Role.P, "--max-num-seqs", "8").stage(JoinAnswer("P3", TOLD), RUN, "life"))
    line = " ".join(command.argv)
    assert "--middleware epd_serve.engine.stage_guard.StageGuard" in line
    assert "--served-model-name served" in line
    assert line.endswith("--max-num-seqs 8")
    assert "API_KEY" not in line + str(command.env)
    assert command.env["VLLM_HOST_IP"] == "10.0.0.9"


def test_flags_that_matter_everywhere_are_told_in_one_spelling() -> None:
    one = processing_text(("--mm_processor_kwargs", '{"b":1, "a":2}', "--max-num-seqs", "8"))
    assert one == processing_text(('--mm-processor-kwargs={"a": 2, "b": 1}',)) != ""
    assert processing_text(("--max-num-seqs", "8")) == ""


@pytest.mark.parametrize(
    "flag", ["--host", "--served-model-name=x", "--api-key", "--kv-transfer-config", "--scheduling_policy"]
)
def test_flags_that_the_cluster_decides_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="decided by the cluster"):
        check_passed(["--max-num-seqs", "8", flag])


@pytest.mark.parametrize("host", ["0.0.0.0", "no-such-host.invalid", "::1"])
def test_an_address_that_others_cannot_use_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        address_of(host, "--host")
