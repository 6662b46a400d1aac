"""The operator's vLLM flags reach the right stages, the more specific ones last."""

from __future__ import annotations

import pytest

from deploy.options.stage_args import parse_stage_args
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import lower

PLANS = {plan.id: plan for plan in lower(parse("2E-P-D"), range(4))}


def test_flags_for_all_come_first_then_the_roles_then_the_instances() -> None:
    raw = ["E1:--seed 2", "all:--seed 0", "E:--seed 1 --note 'two words'"]
    args = parse_stage_args(raw, PLANS.values())
    assert args.of(PLANS["E1"]) == ("--seed", "0", "--seed", "1", "--note", "two words", "--seed", "2")
    assert args.of(PLANS["E0"]) == ("--seed", "0", "--seed", "1", "--note", "two words")
    assert args.of(PLANS["P0"]) == ("--seed", "0")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("--seed 0", "has no target; write 'P:--seed 0'"),
        ("PD:--seed 0", "unknown role or instance 'PD'"),
        ("E2:--seed 0", "unknown role or instance 'E2'"),
        ("P:--note 'open", "No closing quotation"),
        ("P:--port 1", "set by the launcher"),
        ("P:--kv-transfer-config={}", "set by the launcher"),
        ("P:--kv-transfer-config.kv_role kv_both", "set by the launcher"),
        ("P:--tensor_parallel_size=2", "set by the launcher"),
        ("P:-tp 2", "set by the launcher"),
        ("P:--pipeline-parallel-size 2", "set by the launcher"),
        ("P:-dp=2", "set by the launcher"),
    ],
)
def test_an_entry_that_cannot_work_is_refused(raw: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_stage_args([raw], PLANS.values())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("""--additional-config '{"recompute_scheduler_enable": true}'""", "recompute scheduler"),
        ("""--additional_config='{"SLO_limits_for_dynamic_batch": 50}'""", "dynamic batch scheduler"),
        ("""--additional-config '{"profiling_chunk_config": {"enabled": true}}'""", "profiling chunk scheduler"),
        ("--additional-config.profiling_chunk_config.enabled true", "profiling chunk scheduler"),
        ("--additional-config.enable_balance_scheduling=1", "balance scheduler"),
        ("--additional-config.enable_balance_scheduling", "balance scheduler"),
        ("--scheduler-cls some.Scheduler", "set by the launcher"),
    ],
)
def test_a_scheduler_that_would_take_the_place_of_ours_is_refused(flags: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_stage_args([f"all:{flags}"], PLANS.values())


@pytest.mark.parametrize(
    "flags",
    [
        """--additional-config '{"recompute_scheduler_enable": false, "SLO_limits_for_dynamic_batch": -1}'""",
        """--additional-config '{"profiling_chunk_config": {"min_chunk": 4096}, "enable_cpu_binding": true}'""",
        "--additional-config.enable_balance_scheduling false",
        "--additional-config",
        "--additional-config {not-json",
    ],
)
def test_what_else_vllm_ascend_is_configured_with_passes(flags: str) -> None:
    assert parse_stage_args([f"all:{flags}"], PLANS.values()).of(PLANS["P0"])[0].startswith("--additional-config")
