"""Every layout that the devices allow answers as a monolith on the same card does, token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.bodies import about, text_of
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.npu.card import Card
from tests.npu.report import Report
from tests.npu.stages.answers import ONE_AT_A_TIME, TOGETHER, answered, difference, first_difference, is_near_tie
from tests.npu.stages.conftest import Reference
from tests.npu.stages.launches import ORDER, CardServing, over


def test_the_monolith_answers_different_pictures_differently(reference: Reference) -> None:
    """Else equal answers would prove nothing."""
    different = {tuple(place.id for place in answer) for answer in reference.together}
    assert len(different) > len(TOGETHER) / 2, "most pictures get the same answer: use another MODEL"


@over(*ORDER)
@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_greedy_tokens_are_the_monoliths(launch: CardServing, reference: Reference, report: Report, name: str) -> None:
    right = reference.alone[name]
    ours, _ = answered(launch, ONE_AT_A_TIME[name])
    why = difference(ours, right)
    if why and is_near_tie(ours, right, reference.near_tie):
        equal = first_difference(ours, right)
        report.figure("equal_up_to_a_near_tie", f"{name}: {equal} of {len(right)} tokens", launch=launch.name, why=why)
        return
    assert not why


@over(*ORDER)
def test_eight_at_a_time_each_get_the_answer_to_their_own_picture(
    launch: CardServing, reference: Reference, report: Report
) -> None:
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        ours = list(pool.map(lambda body: answered(launch, body)[0], TOGETHER))
    pairs = list(zip(ours, reference.together, strict=True))
    wrong = [difference(one, right) for one, right in pairs if not is_near_tie(one, right, reference.near_tie)]
    equal = sum(first_difference(one, right) is None for one, right in pairs)
    report.figure("answers_equal_at_eight_at_a_time", f"{equal} of {len(pairs)}", launch=launch.name)
    assert not wrong, "\n".join(wrong)


@over(*ORDER)
def test_the_demo_model_names_the_shapes(launch: CardServing, card: Card) -> None:
    if not card.answers_are_known:
        pytest.skip("only the trained demo model's answers are known; it is served on cpu and cuda, without MODEL")
    for prompt in PAIRWISE_DIFFERENT[:4]:
        assert text_of(launch.post("/v1/chat/completions", about(prompt))) == prompt.answer
