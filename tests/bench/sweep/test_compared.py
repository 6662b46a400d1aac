"""What is said of layouts beside plain vLLM and the monolith, and of several seeds."""

from __future__ import annotations

from bench.sweep.compared import compared, over_seeds
from bench.sweep.experiment import deployments
from tests.bench.sweep.experiments import experiment

ASKED = experiment(rates=(1.0,), deployments=deployments("TP1x2,EP-D,E-P-D", vllm=True))


def run(*, ttft: float, p99: float, gaps: float, mean: float, label: str = "1 rps") -> dict[str, float]:
    return {
        f"{label}/ttft_ms/mean": ttft,
        f"{label}/itl_ms/p99": p99,
        f"{label}/slo_2000:50:p90/attainment": gaps / 100,
        f"{label}/slo_2000:50:mean/attainment": mean / 100,
        f"{label}/slo_2000:50:p90/effective_tokens_per_s": gaps,
        f"{label}/slo_2000:50:mean/effective_tokens_per_s": mean,
    }


def figures(**runs: dict[str, float]) -> dict[str, float]:
    names = {"monolith": "TP1x2", "split": "EP-D", "three": "E-P-D", "vllm": "plain vLLM x2"}
    return {f"{names[key]}/{name}": value for key, one in runs.items() for name, value in one.items()}


def test_layouts_are_told_beside_plain_vllm_and_the_monolith_of_as_many_devices():
    found = compared(
        ASKED,
        figures(
            monolith=run(ttft=500, p99=50, gaps=40, mean=60),
            split=run(ttft=900, p99=40, gaps=60, mean=45),
            three=run(ttft=700, p99=30, gaps=80, mean=80),
            vllm=run(ttft=1000, p99=400, gaps=20, mean=50),
        ),
    )
    of_split = {name.removeprefix("EP-D/1 rps/"): value for name, value in found.items() if name.startswith("EP-D")}
    assert of_split == {
        "attained_mean": 0.45,
        "attained_gaps": 0.6,
        "ttft_over_vllm": 0.9,
        "ttft_over_monolith": 1.8,
        "itl_p99_over_vllm": 0.1,
        "itl_p99_over_monolith": 0.8,
        "goodput_over_vllm": 3.0,
        "mean_goodput_over_vllm": 0.9,
        "goodput_over_monolith": 1.5,
        "mean_goodput_over_monolith": 0.75,
    }
    assert found["plain vLLM x2/1 rps/goodput_over_monolith"] == 0.5
    assert "plain vLLM x2/1 rps/ttft_over_vllm" not in found and "TP1x2/1 rps/goodput_over_monolith" not in found
    assert [name for name in found if name.startswith("E-P-D") and "over" in name] == [], "nothing has three devices"


def test_what_served_nothing_within_the_objective_is_no_base():
    found = compared(
        ASKED,
        figures(
            split=run(ttft=900, p99=40, gaps=60, mean=45),
            vllm=run(ttft=1000, p99=400, gaps=0, mean=50),
        ),
    )
    assert "EP-D/1 rps/goodput_over_vllm" not in found
    assert found["EP-D/1 rps/mean_goodput_over_vllm"] == 0.9
    assert "EP-D/1 rps/goodput_over_monolith" not in found, "the monolith was not measured"


def test_seeds_give_a_median_with_the_least_and_the_most():
    each = [{"a": 1.0, "same": 2}, {"a": 5.0, "same": 2}, {"a": 2.0, "same": 2, "once": 7.0}]
    assert over_seeds(each) == {"a": 2.0, "a_least": 1.0, "a_most": 5.0, "same": 2, "once": 7.0}
