"""The command of a stage, per role and device. Pure."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from epd_serve.cpu_threads import CPU_THREADS_ENV, CpuThreads
from epd_serve.engine.argv import (
    BYTE_HASHES_ENV,
    CORE_SHARE_ENV,
    FORCED_TOKENS,
    HCCL_PORTS_ENV,
    OTLP_PROTOCOL_ENV,
    SERVICE_ENV,
    STAGE_ENV,
    V2_RUNNER_ENV,
    WIRING_ENV,
    stage_command,
)
from epd_serve.roles import Role
from epd_serve.stage_plan import StageCommand, StagePlan
from epd_serve.wiring import StageWiring
from npu_ops.core_grants import CoreOrder


def command(role: Role, device: str, *, arena: str = "/dev/shm/a", **changes: Any) -> StageCommand:
    plan: dict[str, Any] = {
        "instance": f"{role}0",
        "role": role,
        "device": device,
        "device_ids": (3,),
        "cores": (0, 1),
        "tp": 1,
        "model": "org/model",
        "served_model_name": "m",
        "port": 4100,
        "uds": "/run/s.http",
        "host": "127.0.0.1",
        "wiring": StageWiring(f"{role}0", role, "inc", arena=arena),
    }
    return stage_command(StagePlan(**{**plan, **changes}))


def flag(made: StageCommand, name: str) -> str | None:
    return made.argv[made.argv.index(name) + 1] if name in made.argv else None


def config(made: StageCommand, name: str) -> dict[str, Any] | None:
    value = flag(made, name)
    return None if value is None else json.loads(value)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("role", [Role.E, Role.P, Role.D, Role.EP, Role.PD, Role.EPD])
def test_connectors_follow_the_role_on_every_device(role: Role, device: str) -> None:
    made = command(role, device)
    ec, kv = config(made, "--ec-transfer-config"), config(made, "--kv-transfer-config")
    ec_role = {Role.E: "ec_producer", Role.P: "ec_consumer", Role.D: "ec_consumer", Role.PD: "ec_consumer"}.get(role)
    kv_role = {Role.P: "kv_producer", Role.EP: "kv_producer", Role.D: "kv_consumer"}.get(role)
    assert (ec and ec["ec_role"], kv and kv["kv_role"]) == (ec_role, kv_role)
    for one, side in ((ec, "ec"), (kv, "kv")):
        if one is not None:
            wiring = StageWiring.from_json(one[f"{side}_connector_extra_config"]["epd"])
            assert wiring == StageWiring(f"{role}0", role, "inc", arena="/dev/shm/a")
            assert one["engine_id"] == f"{role}0-inc"
    if kv is not None:
        assert kv["kv_load_failure_policy"] == "fail"  # `recompute` can kill D's engine


@pytest.mark.parametrize("role", [Role.E, Role.P, Role.D, Role.PD])
def test_without_an_arena_no_features_travel(role: Role) -> None:
    assert config(command(role, "cpu", arena=""), "--ec-transfer-config") is None


def test_the_whole_command_of_a_monolith_on_cpu() -> None:
    made = command(Role.EPD, "cpu", extra_args=("--max-num-seqs", "7"))
    assert made.argv == (
        *(sys.executable, "-m", "epd_serve.engine.stage_main", "--model", "org/model", "--served-model-name", "m"),
        *("--uds", "/run/s.http", "--tensor-parallel-size", "1", "--disable-uvicorn-access-log"),
        *("--scheduling-policy", "priority"),
        *("--logits-processors", FORCED_TOKENS),
        *("--limit-mm-per-prompt", '{"image": 8, "video": 0}', "--enforce-eager", "--block-size", "32"),
        *("--max-num-seqs", "32"),
        *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
        *("--max-num-seqs", "7"),
    )
    assert made.env[STAGE_ENV] == "EPD0"
    assert CpuThreads(**json.loads(made.env[CPU_THREADS_ENV])) == CpuThreads([0, 1])  # type: ignore[arg-type]
    assert Path(made.env["PYTHONPATH"]).name == "site"
    assert not {"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"} & set(made.env)


def test_a_stage_has_a_socket_or_a_port_with_a_guard_and_its_own_queues_stay_at_its_host() -> None:
    on_socket, on_port = command(Role.PD, "cpu"), command(Role.PD, "cpu", uds="")
    assert not {"--host", "--port", "--middleware"} & set(on_socket.argv)
    assert (flag(on_port, "--host"), flag(on_port, "--port")) == ("127.0.0.1", "4100")
    assert flag(on_port, "--middleware") == "epd_serve.engine.stage_guard.StageGuard" and "--uds" not in on_port.argv
    assert on_socket.env["VLLM_HOST_IP"] == on_port.env["VLLM_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize("role", Role)
def test_every_role_reports_its_load_where_an_address_for_it_is_wired(role: Role) -> None:
    wiring = StageWiring(f"{role}0", role, "inc", load_publish="ipc:///run/load")
    made = command(role, "cpu", wiring=wiring)
    assert flag(made, "--scheduler-cls") == "epd_serve.engine.status.scheduler.ReportingScheduler"
    assert StageWiring.from_json(json.loads(made.env[WIRING_ENV])) == wiring
    silent = command(role, "cpu")
    assert flag(silent, "--scheduler-cls") is None and WIRING_ENV not in silent.env


@pytest.mark.parametrize("role", Role)
def test_who_has_a_language_model_notes_what_it_caches_unless_the_operator_says_how(role: Role) -> None:
    wiring = StageWiring(f"{role}0", role, "inc", load_publish="ipc:///run/load")
    made = command(role, "cpu", wiring=wiring)
    events = config(made, "--kv-events-config")
    assert events == (None if role is Role.E else {"enable_kv_cache_events": True, "publisher": "null"})
    assert made.env[BYTE_HASHES_ENV] == "0" and flag(command(role, "cpu"), "--kv-events-config") is None
    theirs = command(role, "cpu", wiring=wiring, extra_args=("--kv-events-config", "{}"))
    assert BYTE_HASHES_ENV not in theirs.env and theirs.argv[-1] == "{}"


@pytest.mark.parametrize("trace", ["", "/traces/P0.jsonl"])
def test_only_a_traced_stage_has_the_middleware_of_the_trace_and_it_is_inside_the_guard(trace: str) -> None:
    wiring = StageWiring("P0", Role.P, "inc", trace_path=trace)

    made = command(Role.P, "cpu", wiring=wiring, uds="")

    middleware = [after for word, after in pairwise(made.argv) if word == "--middleware"]
    assert [one.rpartition(".")[2] for one in middleware] == [*(["RequestTrace"] if trace else []), "StageGuard"]
    assert ("--enable-log-requests" in made.argv) is (WIRING_ENV in made.env) is bool(trace)


@pytest.mark.parametrize("role", Role)
def test_a_stage_sends_its_spans_where_the_front_doors_do_and_by_the_same_protocol(role: Role) -> None:
    wiring = StageWiring(f"{role}0", role, "inc", otlp_traces_endpoint="http://collector:4318/v1/traces")
    made = command(role, "cpu", wiring=wiring)
    assert flag(made, "--otlp-traces-endpoint") == wiring.otlp_traces_endpoint
    assert made.env[OTLP_PROTOCOL_ENV] == "http/protobuf" and made.env[SERVICE_ENV].endswith("0")
    silent = command(role, "cpu")
    assert flag(silent, "--otlp-traces-endpoint") is None and not {OTLP_PROTOCOL_ENV, SERVICE_ENV} & silent.env.keys()


@pytest.mark.parametrize("role", Role)
def test_who_has_a_language_model_serves_by_priority(role: Role) -> None:
    assert flag(command(role, "npu"), "--scheduling-policy") == (None if role is Role.E else "priority")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_the_operators_flags_come_last(role: Role, device: str) -> None:
    assert command(role, device, extra_args=("--dtype", "float32")).argv[-2:] == ("--dtype", "float32")


@pytest.mark.parametrize(("cores", "tp", "count"), [((4, 5), 2, 1), ((4, 5, 6, 7), 2, 2), ((4,), 1, 1), ((4,), 2, 1)])
def test_ranks_share_the_cores_of_a_stage(cores: tuple[int, ...], tp: int, count: int) -> None:
    env = command(Role.P, "cpu", cores=cores, tp=tp).env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    threads = CpuThreads(**json.loads(env[CPU_THREADS_ENV]))
    assert (threads.cores, threads.count, threads.apart) == (list(cores), count, False)


@pytest.mark.parametrize(
    ("device", "tp", "cores", "inside"),
    [("cpu", 1, (0,), True), ("cpu", 2, (0, 1), False), ("cpu", 1, (), False), ("npu", 1, (), False)],
)
def test_a_single_worker_on_cpu_runs_inside_its_engine(
    device: str, tp: int, cores: tuple[int, ...], inside: bool
) -> None:
    """Elsewhere vLLM decides so itself; one without cores of its own is bound by vLLM, which wants it outside."""
    backend = flag(command(Role.D, device, tp=tp, cores=cores), "--distributed-executor-backend")
    assert (backend is not None) is inside


def test_without_cores_of_its_own_a_stage_is_bound_as_vllm_likes() -> None:
    env = command(Role.P, "cpu", cores=()).env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "auto" and CPU_THREADS_ENV not in env


def test_all_stages_of_a_launch_on_cpu_load_openmp_alike() -> None:
    """A process from which stages are forked loads it once for all of them."""
    stages = (command(Role.E, "cpu", colocated=2), command(Role.P, "cpu", colocated=2), command(Role.D, "cpu", tp=2))
    openmp = [
        {name: value for name, value in one.env.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))} for one in stages
    ]
    assert openmp == [{"OMP_WAIT_POLICY": "PASSIVE"}] * 3
    assert "OMP_WAIT_POLICY" not in command(Role.P, "npu", colocated=2).env


@pytest.mark.parametrize(
    ("device", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_a_stage_sees_its_devices_only(device: str, variable: str) -> None:
    made = command(Role.P, device, device_ids=(2, 5), tp=2)
    assert made.env[variable] == "2,5"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in made.env
    assert flag(made, "--tensor-parallel-size") == "2"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_an_encoder_is_told_to_be_one(role: Role, device: str) -> None:
    """vLLM 0.23 does not gather it from `ec_producer`."""
    assert ("--mm-encoder-only" in command(role, device).argv) is (role is Role.E)


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_no_stage_gives_up_async_scheduling(device: str) -> None:
    """What it needs of D on vLLM 0.23 is `compat.steps_in_flight_at_reuse`'s, whoever switches it on."""
    assert not any("async-scheduling" in word for role in Role for word in command(role, device).argv)


@pytest.mark.parametrize(
    ("role", "more", "share"),
    [
        (Role.P, {}, None),
        (Role.P, {"colocated": 2}, "0.425"),
        (Role.E, {}, "0.01"),
        (Role.E, {"colocated": 3}, "0.01"),
        (Role.D, {"memory_share": 0.3, "colocated": 2}, "0.3"),
    ],
)
def test_device_memory_is_shared_between_colocated_stages(role: Role, more: dict[str, Any], share: str | None) -> None:
    assert flag(command(role, "npu", **more), "--gpu-memory-utilization") == share
    assert flag(command(role, "cpu", **more), "--gpu-memory-utilization") is None


def test_a_colocated_stage_is_told_its_kv_cache() -> None:
    assert flag(command(Role.P, "npu", memory_share=0.4, kv_cache_bytes=1 << 30), "--kv-cache-memory-bytes") == str(
        1 << 30
    )
    assert flag(command(Role.P, "npu"), "--kv-cache-memory-bytes") is None


def test_a_model_on_disk_is_not_looked_up_on_the_network(tmp_path: Path) -> None:
    assert command(Role.P, "cpu", model=str(tmp_path)).env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in command(Role.P, "cpu").env


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_a_core_order_reaches_the_workers_by_the_environment(device: str) -> None:
    order = CoreOrder(device, "P0", {"E0": 0.3, "P0": 0.7}, (0, 1), report="/run/P0.cores{rank}.json")
    env = command(Role.P, device, core_order=order).env
    assert CoreOrder.from_json(env[CORE_SHARE_ENV]) == order
    assert env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == ("70" if device == "cuda" else None)
    assert CORE_SHARE_ENV not in command(Role.P, device).env


def test_without_mps_no_percentage_is_pretended() -> None:
    order = CoreOrder("cuda", "P0", {"E0": 0.3, "P0": 0.7}, enforced=False)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in command(Role.P, "cuda", core_order=order).env


@pytest.mark.parametrize("role", list(Role))
def test_who_decodes_can_be_made_to_go_on_after_another_stages_tokens(role: Role) -> None:
    assert flag(command(role, "npu"), "--logits-processors") == (FORCED_TOKENS if role.decodes else None)


@pytest.mark.parametrize("flags", ["--speculative-config {}", "--logits-processors a:B"])
def test_a_stage_that_takes_no_processor_of_ours_gets_none(flags: str) -> None:
    made = command(Role.D, "cuda", extra_args=tuple(flags.split()))
    assert FORCED_TOKENS not in made.argv


def test_one_that_may_take_either_part_has_both_halves_and_samples_what_prefill_has_sampled() -> None:
    made = {role: command(role, "cpu", wiring=StageWiring("X0", role, "inc", both=True)) for role in (Role.P, Role.D)}
    for one in made.values():
        kv = config(one, "--kv-transfer-config")
        assert kv is not None and kv["kv_role"] == "kv_both"
        assert FORCED_TOKENS in one.argv
    assert made[Role.P].env[CPU_THREADS_ENV] == made[Role.D].env[CPU_THREADS_ENV]


@pytest.mark.parametrize(("device", "colocated", "off"), [("npu", 2, True), ("npu", 1, False), ("cuda", 2, False)])
def test_stages_that_share_an_npu_are_not_bound_to_the_same_cores(device: str, colocated: int, off: bool) -> None:
    settings = config(command(Role.P, device, colocated=colocated), "--additional-config")
    assert settings == ({"enable_cpu_binding": False} if off else None)


@pytest.mark.parametrize("theirs", [("--additional-config", "{}"), ("--additional_config.a", "1")])
def test_an_operators_settings_of_vllm_ascend_stand_alone(theirs: tuple[str, ...]) -> None:
    made = command(Role.P, "npu", colocated=2, extra_args=theirs)
    assert made.argv[-2:] == theirs and "enable_cpu_binding" not in " ".join(made.argv)


@pytest.mark.parametrize(
    ("device", "colocated", "tp", "auto"), [("npu", 2, 2, True), ("npu", 2, 1, False), ("npu", 1, 2, False)]
)
def test_ranks_of_stages_that_share_npus_meet_at_ports_of_their_own(
    device: str, colocated: int, tp: int, auto: bool
) -> None:
    made = command(Role.P, device, colocated=colocated, tp=tp, device_ids=tuple(range(tp)))
    assert [made.env.get(name) for name in HCCL_PORTS_ENV] == ["auto" if auto else None] * 2


@pytest.mark.parametrize(
    ("theirs", "variable"),
    [((), "1"), (("--kv-cache-memory-bytes", "2G"), None), (("--kv_cache_memory_bytes=2G",), None)],
)
def test_an_operator_decides_how_much_kv_cache_a_cpu_stage_has(theirs: tuple[str, ...], variable: str | None) -> None:
    assert command(Role.P, "cpu", extra_args=theirs).env.get("VLLM_CPU_KVCACHE_SPACE") == variable


@pytest.mark.parametrize(("device", "runner"), [("cuda", "0"), ("npu", None), ("cpu", None)])
def test_cuda_stages_run_the_first_model_runner(device: str, runner: str | None) -> None:
    assert command(Role.D, device).env.get(V2_RUNNER_ENV) == runner
