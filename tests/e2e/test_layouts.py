"""Every layout answers as a plain monolithic vLLM does, token for token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.bodies import SOLO, TWO_CHOICES, Body, about, ask, stream, text_of
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.serving import Serving

Solo = Callable[[Body], list[list[int]]]
SHORT = ("TP1", "(E-P)-D", "E-PD")
LONG = ("TP1x2", "(E-PD)", "EP-D", "(E-D)-P", "E-P-D", "2E-P-D")


def _layouts() -> list[object]:
    return [*SHORT, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LONG)]


every_layout = pytest.mark.parametrize("launch", _layouts(), indirect=True, scope="module")


@every_layout
@pytest.mark.parametrize("name", SOLO)
def test_greedy_tokens_equal_the_monoliths(launch: Serving, solo_answer: Solo, name: str) -> None:
    assert ask(launch, SOLO[name]) == solo_answer(SOLO[name])


@every_layout
def test_the_same_picture_again_gives_the_same_answer(launch: Serving, solo_answer: Solo) -> None:
    body = about(PAIRWISE_DIFFERENT[6])
    assert ask(launch, body) == ask(launch, body) == solo_answer(body)


@every_layout
def test_a_stream_carries_the_same_tokens_and_ends_with_usage(launch: Serving, solo_answer: Solo) -> None:
    body = about(PAIRWISE_DIFFERENT[5])
    ids, chunks = stream(launch, body)
    assert [ids] == solo_answer(body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    assert all("kv_transfer_params" not in chunk for chunk in chunks)


@every_layout
def test_two_choices_equal_the_monoliths(launch: Serving, solo_answer: Solo) -> None:
    answers = ask(launch, TWO_CHOICES)
    assert len(answers) == 2
    assert answers == solo_answer(TWO_CHOICES)


@every_layout
def test_eight_at_a_time_each_get_the_answer_to_their_own_picture(launch: Serving, solo_answer: Solo) -> None:
    bodies = [about(prompt) for prompt in PAIRWISE_DIFFERENT]
    alone = [solo_answer(body) for body in bodies]
    assert len({str(answer) for answer in alone}) == len(bodies), "the demo answers have to differ pairwise"
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: ask(launch, body), bodies)) == alone


@every_layout
def test_the_answer_is_right_and_carries_nothing_internal(launch: Serving) -> None:
    prompt = PAIRWISE_DIFFERENT[0]
    response = launch.post("/v1/chat/completions", about(prompt))
    assert text_of(response) == prompt.answer
    assert not {"kv_transfer_params", "ec_transfer_params"} & set(response.json())


@every_layout
def test_a_list_of_prompts_is_answered_in_order(launch: Serving, monolith: Serving) -> None:
    body = {"model": "epd-demo", "prompt": ["Hello", "Thanks for", "a red"], "max_tokens": 8, "temperature": 0}
    texts = [[c["text"] for c in end.post("/v1/completions", body).json()["choices"]] for end in (launch, monolith)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


@every_layout
def test_health_models_and_instances_describe_the_layout(launch: Serving) -> None:
    assert launch.get("/health").json()["status"] == "ok"
    assert launch.get("/v1/models").json()["data"][0]["id"] == "epd-demo"
    assert all(entry["up"] for entry in launch.instances().values())
    assert all(sum(entry["in_flight"].values()) == 0 for entry in launch.instances().values())
