"""One scrape of a deployment of real stages: ours, and what each stage's vLLM says of itself."""

from __future__ import annotations

import re
import signal
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.bodies import ask, fresh
from tests.e2e.serving import ROOT, Serving
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
DASHBOARD = ROOT / "docs/examples/monitoring/dashboard.json"
epd = pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True)


def stages_of(launch: Serving) -> dict[str, set[str]]:
    """Of each metric of vLLM's, the instances that it is there of."""
    found: dict[str, set[str]] = {}
    families = list(text_string_to_metric_families(launch.get("/metrics").text))
    assert len(families) == len({one.name for one in families}), "each family once"
    for sample in (sample for one in families for sample in one.samples if one.name.startswith("vllm:")):
        found.setdefault(sample.name, set()).add(sample.labels["instance"])
    return found


@epd
def test_every_stage_says_what_the_dashboard_asks_of_vllm(launch: Serving) -> None:
    ask(launch, fresh(40))
    asked = set(re.findall(r"vllm:\w+", DASHBOARD.read_text(encoding="utf-8")))
    stages = stages_of(launch)
    assert {name: stages.get(name) for name in asked} == {name: {"E0", "P0", "D0"} for name in asked}
    assert len(stages) > 50, "all of the rest, too"


@epd
def test_a_stage_that_hangs_costs_a_scrape_a_second_and_its_own_series(launch: Serving) -> None:
    wait_for(lambda: stages_of(launch)["vllm:num_requests_running"] == {"E0", "P0", "D0"}, "all to answer")

    def without_e0() -> bool:
        begun = time.monotonic()
        named = stages_of(launch)["vllm:num_requests_running"]
        assert time.monotonic() - begun < 4.0
        return named == {"P0", "D0"}

    launch.signal_stage("E0", signal.SIGSTOP)
    try:
        wait_for(without_e0, "what was said in the second before to be over")
        assert launch.metric('epd_stage_scrapes_missed_total{cause="late",instance="E0"}') >= 1
    finally:
        launch.signal_stage("E0", signal.SIGCONT)
