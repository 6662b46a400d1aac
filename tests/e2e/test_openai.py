"""The `openai` SDK against real stages: what its users call, sync and async, through three stages and through one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.bodies import about, chat
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, TEXT_ONLY
from tests.e2e.serving import MODEL, Serving

pytestmark = pytest.mark.slow
# A tool parser, which vLLM wants for tools, and JSON without white space, of which so small a model finds no end.
FORMS = (
    "--stage-args",
    "all:--enable-auto-tool-choice --tool-call-parser hermes "
    """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'""",
)
layouts = pytest.mark.parametrize(
    "launch",
    [
        pytest.param(("E-P-D", *FORMS), id="E-P-D", marks=pytest.mark.promise("openai-sdk")),
        pytest.param(("TP1", *FORMS), id="TP1"),
    ],
    indirect=True,
)

PROMPT = PAIRWISE_DIFFERENT[0]
PICTURE: Any = about(PROMPT)["messages"]
TEXT: Any = chat(TEXT_ONLY[0][0])["messages"]
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 24}
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "paint", "parameters": SCHEMA, "strict": True}


@pytest.fixture
def client(launch: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0, timeout=180) as found:
        yield found


def response_input() -> Any:
    url = PICTURE[0]["content"][0]["image_url"]["url"]
    shown = {"type": "input_image", "image_url": url, "detail": "auto"}
    return [{"role": "user", "content": [shown, {"type": "input_text", "text": PROMPT.question}]}]


@layouts
def test_chat_about_a_picture_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=PICTURE, **GREEDY)
    stream = client.chat.completions.create(messages=PICTURE, stream=True, **GREEDY)
    streamed = "".join(one.choices[0].delta.content or "" for one in stream if one.choices)
    assert whole.choices[0].message.content == streamed == PROMPT.answer
    assert whole.usage and whole.usage.completion_tokens > 0


@layouts
async def test_the_asynchronous_client_is_served_alike(launch: Serving) -> None:
    async with openai.AsyncOpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(messages=PICTURE, **GREEDY)
        stream = await client.chat.completions.create(messages=PICTURE, stream=True, **GREEDY)
        parts = [one.choices[0].delta.content or "" async for one in stream if one.choices]
    assert whole.choices[0].message.content == "".join(parts) == PROMPT.answer


@layouts
def test_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=TEXT, n=2, temperature=0.01, seed=1, max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs and choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


@layouts
def test_a_json_schema_is_kept_to(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(messages=PICTURE, response_format=form, **{**GREEDY, "max_tokens": 40})
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "green", "blue")


def no_white_space(launch: Serving) -> dict[str, int]:
    """A logit bias: a tool's JSON may have white space everywhere, of which so small a model finds no end."""
    marks = [{"prompt": mark, "add_special_tokens": False} for mark in (" ", "\n", "\r", "\t")]
    return {str(token): -100 for mark in marks for token in launch.post("/tokenize", mark).json()["tokens"]}


@layouts
def test_a_named_tool_is_called(client: openai.OpenAI, launch: Serving) -> None:
    answer = client.chat.completions.create(
        messages=TEXT,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice={"type": "function", "function": {"name": "paint"}},
        logit_bias=no_white_space(launch),
        **{**GREEDY, "max_tokens": 200},
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green", "blue")


@layouts
def test_responses_about_text_and_a_picture_whole_and_streamed(client: openai.OpenAI) -> None:
    more: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(input=response_input(), **more)
    with client.responses.create(input=response_input(), stream=True, **more) as stream:
        events = list(stream)
    streamed = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert whole.output_text == streamed == PROMPT.answer
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    said = client.chat.completions.create(messages=TEXT, **GREEDY).choices[0].message.content
    assert client.responses.create(input=TEXT_ONLY[0][0], **more).output_text == said
    assert "kv_transfer_params" not in {name for name, value in whole.model_dump().items() if value}


@layouts
def test_what_stages_cannot_remember_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="store: false") as caught:
        client.responses.create(model=MODEL, input="x", store=True)
    assert caught.value.param == "store"


@layouts
def test_fields_that_vllm_has_not_are_left_out_and_those_that_could_hurt_it_are_refused(client: openai.OpenAI) -> None:
    ask: Any = {"messages": TEXT, **GREEDY}
    usual: Any = {"metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "store": False}
    said = client.chat.completions.create(**ask).choices[0].message.content
    unheard_of = {"kv_steering_params": {"peer": "x"}, "vllm_xargs": {"mine": 1}}
    assert client.chat.completions.create(**ask, **usual, extra_body=unheard_of).choices[0].message.content == said
    for name in ("kv_transfer_params", "cache_salt", "request_id", "mm_processor_kwargs"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask, extra_body={name: {"x": 1}})
        assert caught.value.param == name


@layouts
def test_tokens_of_a_prompt_are_those_that_usage_counts(launch: Serving, client: openai.OpenAI) -> None:
    counted = client.chat.completions.create(messages=PICTURE, **GREEDY).usage
    tokens = launch.post("/tokenize", {"model": MODEL, "messages": PICTURE}).json()
    assert counted and counted.prompt_tokens == tokens["count"] == len(tokens["tokens"])
    text = launch.post("/tokenize", {"prompt": "a red square", "add_special_tokens": False}).json()["tokens"]
    assert launch.post("/detokenize", {"tokens": text}).json() == {"prompt": "a red square"}
