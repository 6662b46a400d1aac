"""Which SLO stages are told: that of the front doors where it is named, and none where nobody names one."""

from __future__ import annotations

import pytest

from deploy.agent.specs import specs
from deploy.options.config import build_config
from deploy.plan.blueprint import draw


@pytest.mark.parametrize(
    ("named", "budgets", "told"),
    [
        ((), "on", (0.0, 0.0)),
        (("media.max_bytes=1000000",), "on", (0.0, 0.0)),
        (("slo.judge=p99",), "on", (0.0, 0.0)),
        (("slo.tpot_s=0.03",), "on", (2.0, 0.03)),
        (("slo.ttft_s=1.5", "slo.tpot_s=0.03"), "on", (1.5, 0.03)),
        (("slo.ttft_s=1.5", "slo.tpot_s=0.03"), "off", (0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sim"])
def test_every_stage_is_told_the_slo_that_is_named(
    named: tuple[str, ...], budgets: str, told: tuple[float, float], engine: str
) -> None:
    flags = {"layout": "(E-PD)", "device": "cpu", "engine": engine, "proxy": named, "step_budgets": budgets}
    config = build_config(flags)
    stages = [spec.stage for spec in specs(draw(config))]
    assert [(one.wiring.slo_ttft_s, one.wiring.slo_tpot_s) for one in stages if one is not None] == [told, told]
