"""A simulated stage that holds its steps to an SLO."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd_serve.budgets import Budgets
from epd_serve.roles import Role
from epd_serve.sim.main import budgets_of
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.sim.scheduler import Scheduler
from epd_serve.sim.sequence import Sequence
from epd_serve.wiring import StageWiring

PROFILE = Profile(
    encode=Line(0.002, 0.0001), prefill=Line(0.001, 0.0001), decode_step_s=((1, 0.01), (64, 0.02)), capacity=Capacity()
)
TBT_S, IMAGE = 0.1, 400
"""An image takes 42 ms to encode, 41 ms to prefill."""


def stage(**slo: float) -> StageWiring:
    return StageWiring("EPD0", Role.EPD, "life", **slo)  # type: ignore[arg-type]


def sequence(prompt: int, limit: int, token: Callable[[int, bool], None] = lambda number, last: None) -> Sequence:
    return Sequence(prompt_tokens=prompt, limit=limit, on_token=token)


def gaps_of_bursts(budgets: Budgets | None) -> tuple[list[float], int]:
    """Seconds of steps with decodes while four texts decode and eight images come every forty steps; answered ones."""
    scheduler, gaps, answered = Scheduler(PROFILE.capacity, budgets=budgets), [], []
    for _ in range(4):
        scheduler.add(sequence(16, 5000))
    for number in range(400):
        if number % 40 == 0:
            for _ in range(8):
                picture = sequence(IMAGE + 8, 1, lambda _, last: answered.append(last))
                picture.items = (IMAGE,)
                scheduler.add(picture)
        step = scheduler.plan()
        seconds = sum(PROFILE.step_parts_s(step.item_tokens, step.prompt_tokens, len(step.decodes)))
        if budgets is not None:
            amounts = {"prompt_tokens": step.prompt_tokens, "item_tokens": step.item_tokens}
            budgets.measured(seconds, decodes=len(step.decodes), **amounts)
        if step.decodes:
            assert len(step.decodes) == 4, "no decode is held"
            gaps.append(seconds)
        scheduler.complete(step)
    return gaps, len(answered)


def test_decodes_do_not_wait_behind_a_burst_of_images() -> None:
    free, all_answered = gaps_of_bursts(None)
    held, answered = gaps_of_bursts(budgets_of(stage(slo_ttft_s=4.0, slo_tpot_s=TBT_S), PROFILE))
    assert max(free) > 0.5, "eight images in one step"
    assert max(held[80:]) <= TBT_S, "learnt from the first bursts"
    assert answered == all_answered == 80


def test_without_an_slo_a_stage_has_no_budgets() -> None:
    assert budgets_of(stage(), PROFILE) is None


@pytest.mark.parametrize("role", [Role.E, Role.P])
def test_limits_are_those_of_the_stage_at_most(role: Role) -> None:
    budgets = budgets_of(StageWiring("X0", role, "life", slo_ttft_s=1.0, slo_tpot_s=0.1), PROFILE)
    assert budgets is not None
    assert budgets.limits(0, 0, 0).tokens == PROFILE.capacity.step_tokens
