"""The `anthropic` SDK against real stages, through three stages, through two and through one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.bodies import png, text_of
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, TEXT_ONLY, DemoPrompt
from tests.e2e.serving import MODEL, Serving
from tests.e2e.test_openai import FORMS, SCHEMA

pytestmark = pytest.mark.slow
layouts = pytest.mark.parametrize(
    "launch",
    [
        pytest.param(("E-P-D", *FORMS), id="E-P-D", marks=pytest.mark.promise("anthropic-sdk")),
        pytest.param(("P-D", *FORMS), id="P-D"),
        pytest.param(("TP1", *FORMS), id="TP1"),
    ],
    indirect=True,
)
PROMPT = PAIRWISE_DIFFERENT[0]
TEXT: Any = [{"role": "user", "content": TEXT_ONLY[0][0]}]
ASK: Any = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "paint", "description": "in a colour", "input_schema": SCHEMA, "strict": True}


@pytest.fixture
def client(launch: Serving) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=launch.url, api_key="none", max_retries=0, timeout=180) as found:
        yield found


def image(prompt: DemoPrompt) -> Any:
    data = base64.b64encode(png(prompt.picture())).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def shown(prompt: DemoPrompt) -> Any:
    return [{"role": "user", "content": [image(prompt), {"type": "text", "text": prompt.question}]}]


def text(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


@layouts
def test_a_message_about_a_picture_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=shown(PROMPT), **ASK)
    with client.messages.stream(messages=shown(PROMPT), **ASK) as stream:
        pieces = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text(whole) == text(streamed) == pieces == PROMPT.answer
    assert whole.usage == streamed.usage and whole.usage.output_tokens > 0
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=MODEL, messages=shown(PROMPT))
    assert counted.input_tokens == whole.usage.input_tokens


@layouts
def test_a_picture_that_a_tool_gave_back(client: anthropic.Anthropic, launch: Serving) -> None:
    """The tool's text is its message, its picture a user's: as the same chat says it."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}, image(PROMPT)]}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    turns: Any = [
        *TEXT,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": PROMPT.question}]},
    ]
    answer = client.messages.create(messages=turns, **ASK)
    url = f"data:image/png;base64,{image(PROMPT)['source']['data']}"
    function = {"name": "look", "arguments": "{}"}
    chat = [
        *TEXT,
        {"role": "assistant", "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "t1", "content": "ok"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
        {"role": "user", "content": PROMPT.question},
    ]
    body = {"model": MODEL, "messages": chat, "max_tokens": 24, "temperature": 0}
    assert text(answer) == text_of(launch.post("/v1/chat/completions", body))


@layouts
def test_a_tool_is_called_and_a_schema_kept_to(client: anthropic.Anthropic) -> None:
    body = {**ASK, "max_tokens": 40}
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert any(colour in text(client.messages.create(messages=shown(PROMPT), output_config=form, **body)) for colour in
               ("red", "green", "blue"))  # fmt: skip
    choice: Any = {"type": "tool", "name": "paint"}
    with client.messages.stream(
        messages=TEXT, tools=[TOOL], tool_choice=choice, **{**ASK, "max_tokens": 200}
    ) as stream:
        [called] = stream.get_final_message().content
    assert called.type == "tool_use" and called.name == "paint"


@layouts
def test_what_is_wrong_is_the_sdk_s_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=MODEL, max_tokens=0, messages=TEXT)
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
        client.messages.create(model=MODEL, max_tokens=10_000_000, messages=TEXT)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, messages=TEXT)
