"""Stages that hold their steps to an SLO: limits change, answers do not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.bodies import Body, ask, conversation, fresh_prompt, png
from tests.e2e.serving import Serving
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
STRICT = ("--proxy", "slo.ttft_s=0.02", "--proxy", "slo.tpot_s=0.001")
"""Less than a step takes on any machine, however fast: what is left to a step is as little as there is."""


def scheduler_of(launch: Serving, instance: str) -> dict[str, Any]:
    found: dict[str, Any] = launch.instances()[instance]["stage"] or {}
    return found


@pytest.mark.parametrize("launch", [("TP1", *STRICT)], indirect=True)
@pytest.mark.promise("same-tokens")
def test_a_burst_within_an_slo_that_is_too_strict_is_answered_as_ever(launch: Serving, solo_answer: Solo) -> None:
    shown = [[png(fresh_prompt(950 + 2 * turn + one).picture()) for one in range(2)] for turn in range(9)]
    bodies = [conversation(2, *pictures) for pictures in shown]
    alone = [solo_answer(body) for body in bodies]
    (instance,) = launch.instances()
    with ThreadPoolExecutor(3) as pool:
        for first in range(0, len(bodies), 3):  # the first ones teach it what steps take
            burst = slice(first, first + 3)
            assert list(pool.map(lambda body: ask(launch, body), bodies[burst])) == alone[burst]
    report = wait_for(lambda: (found := scheduler_of(launch, instance))["held_steps"] and found, "a step to be held")
    assert 0 < report["token_budget"] < 2048 and 0 <= report["item_budget"] < 2048
    assert launch.metric("epd_stage_held_steps") > 0
