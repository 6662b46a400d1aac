"""The operator's vLLM flags reach the right stages, the more specific ones last."""

from __future__ import annotations

import pytest

from deploy.stage_args import parse_stage_args
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
