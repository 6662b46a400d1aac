"""Budgets of steps in vLLM's own scheduler: the one that is installed, 0.32 or 0.23."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_serve.sim.profile import Capacity
from epd_serve.sim.scheduler import Scheduler
from epd_serve.sim.sequence import Sequence

ROOT = Path(__file__).resolve().parents[3]
SHARED_STEP = 800
SHARED_PROMPTS = (("a", 1000), ("b", 900), ("c", 60), ("d", 1000))
"""Of the program, which needs vLLM."""
TBT_TOKENS = 100
"""Prompt and item tokens of a step that takes TBT, with what the program teaches; decodes take a tenth of it."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What each scenario of `budget_steps.py` saw. vLLM cannot be imported beside pytest's own environment."""
    site = str(ROOT / "epd_serve/engine/site")
    env = {**os.environ, "PYTHONPATH": site, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-m", "tests.epd_serve.engine.budget_steps"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def texts(step: dict[str, Any]) -> int:
    return sum(name.startswith("t") for name in step["tokens"])


def test_no_decode_waits_behind_a_burst_of_images(seen: dict[str, Any]) -> None:
    steps = seen["burst"]["steps"]
    assert all(texts(step) == 4 for step in steps), "every text gets its token in every step"
    assert all(step["items"] <= 1 for step in steps)
    assert all(sum(step["tokens"].values()) <= 4 + TBT_TOKENS for step in steps)
    assert sum(step["items"] for step in steps) == 12
    assert seen["burst"]["held"] >= 12, "each image left something for the next steps"


def test_without_an_slo_vllms_limits_stay_and_a_burst_is_one_step(seen: dict[str, Any]) -> None:
    free = seen["burst, no slo"]
    assert free["limits"] == free["own"]
    assert free["steps"][0]["items"] == 12


def test_an_image_larger_than_its_budget_is_encoded_though_texts_keep_coming(seen: dict[str, Any]) -> None:
    steps = seen["oversize"]["steps"]
    assert sum(step["items"] for step in steps) == 1
    assert all(step["tokens"].get("t") == 1 for step in steps)


def test_an_image_of_a_request_that_has_ended_is_not_made_room_for(seen: dict[str, Any]) -> None:
    assert seen["ended before"] == {"next": 0, "known": []}


@pytest.mark.parametrize(("scenario", "tokens"), [("without chunks", {"long": 600}), ("whole items", {"i": 310})])
def test_what_vllm_must_not_cut_is_computed_in_one_step(
    seen: dict[str, Any], scenario: str, tokens: dict[str, int]
) -> None:
    assert seen[scenario]["steps"] == [{"tokens": {"t": 1, **tokens}, "items": int("i" in tokens)}]


def test_a_long_prompt_that_is_not_alone_leaves_others_their_part_of_a_step_as_a_simulated_stage_has_it(
    seen: dict[str, Any],
) -> None:
    found = seen["shared"]
    if not found["knows"]:  # vLLM 0.23 would hold one back that is alone
        assert (found["reported"], found["threshold"]) == (0, 0)
        return
    assert found["reported"] == SHARED_STEP
    steps = [step["tokens"] for step in found["steps"]]
    assert steps[0] == {"a": SHARED_STEP}, "alone it has all"
    assert steps[1]["c"] == 60 and steps[1]["b"] > 0, "a short one is computed at once, and a long one goes on"
    capacity = Capacity(step_tokens=SHARED_STEP, block_tokens=16, long_prompt_tokens=found["threshold"])
    assert steps == simulated(Scheduler(capacity, shares_steps=True))


def simulated(scheduler: Scheduler) -> list[dict[str, int]]:
    """The same prompts in the simulator's scheduler."""
    names: dict[Sequence, str] = {}
    steps: list[dict[str, int]] = []

    def add(name: str, tokens: int) -> None:
        sequence = Sequence(prompt_tokens=tokens, limit=1, on_token=lambda *_: None)
        names[sequence] = name
        scheduler.add(sequence)

    add(*SHARED_PROMPTS[0])
    while step := scheduler.plan():
        steps.append({names[sequence]: tokens for sequence, tokens in step.prefills})
        scheduler.complete(step)
        if len(steps) == 1:
            for prompt in SHARED_PROMPTS[1:]:
                add(*prompt)
    return steps


def test_what_the_operator_set_or_vllm_must_not_cut_is_left_as_it_is(seen: dict[str, Any]) -> None:
    own = seen["shared, by the operator"]
    assert (own["threshold"], own["reported"]) == (200, 0)
    whole = seen["shared, without chunks"]
    assert (whole["threshold"], whole["reported"]) == (0, 0)
    assert all(set(step["tokens"].values()) <= {1000, 900, 60} for step in whole["steps"])


def test_it_costs_a_step_next_to_nothing(seen: dict[str, Any]) -> None:
    assert seen["cost"]["us"] < 200, "of a machine that may be busy; some 30 where it is not"
