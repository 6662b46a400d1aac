"""Every layout answers as a plain monolithic vLLM does, token for token."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.e2e.bodies import SOLO, TWO_CHOICES, Body, about, ask, stream, text_of
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.serving import Serving
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
SHORT = ("TP1", "(E-P)-D", "E-PD")
LONG = ("TP1x2", "(E-PD)", "EP-D", "(E-D)-P", "E-P-D", "2E-P-D")


ENCODER_FREE = pytest.param(
    ("E-P-D", "--encoder-free"),
    marks=[pytest.mark.slow, pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM takes no metadata alone")],
    id="E-P-D, encoder-free",
)


def _layouts() -> list[object]:
    return [*SHORT, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LONG), ENCODER_FREE]


every_layout = pytest.mark.parametrize("launch", _layouts(), indirect=True)


@every_layout
@pytest.mark.promise("same-tokens")
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


@every_layout
@pytest.mark.promise("memory-plan")
def test_the_memory_of_every_stage_was_worked_out_before_it_started(launch: Serving) -> None:
    plan = launch.run / "memory.txt"
    header, *rows = [line.split() for line in plan.read_text().splitlines() if line.strip()]
    assert header[:2] == ["instance", "cpu"] and header[-2:] == ["tokens", "share"]
    instances = launch.instances()
    planned = {row[0]: row for row in rows if row[0] in instances}
    assert set(planned) == set(instances)
    assert all((planned[name][-2] != "-") is (entry["role"] != "E") for name, entry in instances.items())
    begun = min(psutil.Process(launch.stage_pid(name)).create_time() for name in instances)
    assert plan.stat().st_mtime <= begun + 0.5


@every_layout
def test_a_response_says_what_chat_says_about_the_same_picture(launch: Serving) -> None:
    prompt = PAIRWISE_DIFFERENT[7]
    url = about(prompt)["messages"][0]["content"][0]["image_url"]["url"]
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": prompt.question}]
    body = {"model": "epd-demo", "input": [{"role": "user", "content": parts}], "max_output_tokens": 24}
    response = launch.post("/v1/responses", {**body, "temperature": 0}, headers={"x-epd-explain": "1"})
    assert response.status_code == 200, response.text[:500]
    said = response.json()["output"][-1]["content"][0]["text"]
    assert said == text_of(launch.post("/v1/chat/completions", about(prompt)))
    told = response.headers["x-epd-instances"].split(", ")
    assert {name.partition("=")[2] for name in told} <= set(launch.instances())


@every_layout
def test_a_message_says_what_chat_says_about_the_same_picture(launch: Serving) -> None:
    prompt = PAIRWISE_DIFFERENT[4]
    data = about(prompt)["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2]
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    content = [shown, {"type": "text", "text": prompt.question}]
    asked = {"model": "epd-demo", "messages": [{"role": "user", "content": content}]}
    body = {**asked, "max_tokens": 24, "temperature": 0}
    said = launch.post("/v1/messages", body).json()
    chat = launch.post("/v1/chat/completions", about(prompt))
    assert said["content"] == [{"type": "text", "text": text_of(chat)}]
    prompt_tokens = chat.json()["usage"]["prompt_tokens"]
    assert said["usage"]["input_tokens"] == prompt_tokens
    assert launch.post("/v1/messages/count_tokens", asked).json() == {"input_tokens": prompt_tokens}
    events = launch.post("/v1/messages", {**body, "stream": True}).text.split("\n\n")[:-1]
    told = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert told[-1] == {"type": "message_stop"}
    assert "".join(one["delta"]["text"] for one in told if one["type"] == "content_block_delta") == text_of(chat)
    assert told[-2]["usage"] == said["usage"]


@every_layout
def test_a_prompt_has_as_many_tokens_as_usage_counts(launch: Serving) -> None:
    body = about(PAIRWISE_DIFFERENT[7])
    usage = launch.post("/v1/chat/completions", body).json()["usage"]
    assert launch.post("/tokenize", {"messages": body["messages"]}).json()["count"] == usage["prompt_tokens"]


@every_layout
def test_every_instance_tells_how_busy_it_is(launch: Serving) -> None:
    def reports() -> dict[str, dict[str, Any]]:
        return {name: entry["stage"] or {} for name, entry in launch.instances().items()}

    def idle() -> bool:
        counts = ("waiting", "running", "pending_prompt_tokens", "pending_item_tokens")
        return all(told and not any(told[name] for name in counts) for told in reports().values())

    def busy(told: dict[str, Any]) -> bool:
        return bool(told["running"] and told["decode_tokens_per_s"] and told["kv_used"])

    seen = threading.Event()

    def keep_asking() -> None:
        while not seen.is_set():
            ask(launch, about(PAIRWISE_DIFFERENT[0], max_tokens=300, ignore_eos=True))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keep_asking)
        try:
            decoders = {name for name, entry in launch.instances().items() if "D" in entry["role"]}
            wait_for(lambda: any(busy(reports()[name]) for name in decoders), "a report of an answer being made", 60)
        finally:
            seen.set()
        asking.result(timeout=60)
    wait_for(idle, "reports of nothing to do", 20)
    first = reports()
    assert all(told["age_s"] < 3 for told in first.values())
    wait_for(lambda: all(told["seq"] > first[name]["seq"] for name, told in reports().items()), "the next reports", 20)
    roles = {name: entry["role"] for name, entry in launch.instances().items()}
    assert all((told["kv_tokens"] > 0) is (roles[name] != "E") for name, told in first.items())
    encoded = {roles[name] for name, told in first.items() if told["item_tokens_per_s"] > 0}
    prefilled = {roles[name] for name, told in first.items() if told["prompt_tokens_per_s"] > 0}
    assert any("E" in role for role in encoded) and any("P" in role for role in prefilled)


@every_layout
def test_whoever_has_a_language_model_takes_priorities(launch: Serving) -> None:
    text = {"model": "epd-demo", "prompt": "Hello", "max_tokens": 1, "priority": -1}
    for name, entry in launch.instances().items():
        if entry["role"] != "E":
            assert launch.stage(name).post("/v1/completions", text).status_code == 200, name


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["(E-P)-D", "TP1"], indirect=True)
def test_what_needs_one_instance_is_what_the_monolith_says(launch: Serving, monolith: Serving) -> None:
    """Prompt tokens and those after them, with the picture's encoding from E; P answers alone where nobody else can."""
    about_it = {**about(PAIRWISE_DIFFERENT[0]), "prompt_logprobs": 1}
    echoed = {
        "model": "epd-demo",
        "prompt": "Thanks for",
        "max_tokens": 8,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    beams = {**echoed, "use_beam_search": True, "n": 2, "echo": False, "logprobs": None}
    for path, body in (("/v1/chat/completions", about_it), ("/v1/completions", echoed), ("/v1/completions", beams)):
        own, plain = (end.post(path, body).json() for end in (launch, monolith))
        assert _said(own) == _said(plain) != [], path
        assert _prompt(own) == _prompt(plain)
    assert _prompt(launch.post("/v1/chat/completions", about_it).json()), "there are some"


def _said(answer: dict[str, Any]) -> list[Any]:
    choices = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    tokens = [(choice.get("logprobs") or {}).get("tokens") for choice in answer["choices"]]
    return [*choices, *tokens]


def _prompt(answer: dict[str, Any]) -> list[Any]:
    """The prompt's tokens, each with the likeliest in its place, and their logarithms as far as cores agree."""
    told = answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs") or []
    return [
        sorted((token, round(one["logprob"], 1)) for token, one in place.items()) for place in told if place is not None
    ]
