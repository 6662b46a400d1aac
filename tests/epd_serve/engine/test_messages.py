"""Our Messages API against the installed vLLM's own: the same chat of a request, the same message of an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import epd_serve
from proxy.fields.messages import chat_of
from proxy.http.message_form import MessageForm

ROOT = Path(__file__).parents[3]
SITE = Path(epd_serve.__file__).with_name("engine") / "site"
BASE: dict[str, Any] = {"model": "demo", "max_tokens": 3000, "messages": [{"role": "user", "content": "hello"}]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
URL = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
TOOL = {"name": "f", "description": "d", "input_schema": {"properties": {"a": {"type": "string"}}}}


def turns(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": one} for number, one in enumerate(contents)]


REQUESTS: dict[str, dict[str, Any]] = {
    "text": {},
    "stream": {"stream": True, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 3, "top_p": 0.9},
    "system": {"system": "be brief"},
    "system blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " brief"},
        ]
    },
    "system within": {
        "system": "be brief",
        "messages": [*BASE["messages"], {"role": "system", "content": "now"}, *turns("hello")],
    },
    "images": {"messages": turns([IMAGE, {"type": "text", "text": "a"}, URL], [{"type": "text", "text": "b"}], "c")},
    "one image": {"messages": turns([IMAGE])},
    "no text": {"messages": turns([{"type": "text", "text": ""}, IMAGE])},
    "thoughts": {
        "messages": turns(
            "a",
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "text", "text": "c"},
            ],
            "d",
        )
    },
    "tool results": {
        "messages": turns(
            "a",
            [
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
            [
                {"type": "text", "text": "c"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}, IMAGE, URL]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "2", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                IMAGE,
            ],
        )
    },
    "tool references": {
        "messages": turns(
            "a",
            [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "1"}, {"type": "tool_reference", "tool_name": "g"}],
                }
            ],
        )
    },
    "tools": {"tools": [TOOL, {"name": "g", "input_schema": {"type": "object"}, "defer_loading": True}]},
    "any tool": {"tools": [TOOL], "tool_choice": {"type": "any"}},
    "this tool": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
    "no tool": {"tools": [TOOL], "tool_choice": {"type": "none"}},
    "effort": {"output_config": {"effort": "low"}},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    "template": {"chat_template_kwargs": {"a": 1}},
}
NEWER: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    "no thinking": {"thinking": {"type": "disabled"}},
    "adaptive": {"thinking": {"type": "adaptive"}},
    "one at a time": {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
"""What 0.23 has no fields for, and passes over."""


def chunk(usage: bool = True, **choice: Any) -> dict[str, Any]:
    delta = choice.pop("delta", {})
    counted = {"usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}} if usage else {}
    one = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo", "choices": [one],
            **counted}  # fmt: skip


def call(index: int, name: str | None, arguments: str | None) -> dict[str, Any]:
    own = {"id": f"call_{index}", "type": "function"} if name else {}
    function = {**({"name": name} if name else {}), **({"arguments": arguments} if arguments is not None else {})}
    return chunk(delta={"tool_calls": [{"index": index, **own, "function": function}]})


FIRST = chunk(delta={"role": "assistant", "content": ""})
STREAMS: dict[str, list[dict[str, Any]]] = {
    "text": [chunk(delta={"content": "h"}), chunk(delta={"content": "i"}), chunk(finish_reason="stop")],
    "nothing": [chunk(finish_reason="stop")],
    "cut": [chunk(delta={"content": "h"}, finish_reason="length")],
    "stop token": [chunk(delta={"content": "h"}), chunk(finish_reason="stop", stop_reason=2)],
    "thoughts": [
        chunk(delta={"reasoning": "h"}),
        chunk(delta={"reasoning": "m"}),
        chunk(delta={"content": "i"}),
        chunk(finish_reason="stop"),
    ],
    "thoughts only": [chunk(delta={"reasoning": "h"}), chunk(finish_reason="length")],
    "tools": [
        chunk(delta={"content": "i"}),
        call(0, "f", ""),
        call(0, None, '{"a": '),
        call(0, None, "1}"),
        call(1, "g", "{}"),
        chunk(finish_reason="tool_calls"),
    ],
    "a named tool": [call(0, "f", '{"a": 1}'), chunk(finish_reason="stop")],
    "a call that max_tokens cut off": [call(0, "f", '{"a"'), chunk(finish_reason="length")],
}
LATER: dict[str, list[dict[str, Any]]] = {
    "stop text": [chunk(delta={"content": "h"}), chunk(finish_reason="stop", stop_reason="x")],
    "text within a call": [
        call(0, "f", '{"a": '),
        chunk(delta={"content": " "}),
        call(0, None, "1}"),
        chunk(finish_reason="tool_calls"),
    ],
    "a call that a stop text cut off": [call(0, "f", '{"a"'), chunk(finish_reason="stop", stop_reason="x")],
}
"""What older releases have wrong."""


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Without what is drawn, or was worded another way and means the same."""
    events = []
    for event in raw.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        decoded = json.loads(data.removeprefix(b"data: "))
        assert name == f"event: {decoded['type']}".encode()
        for holder in (decoded.get("message"), decoded.get("delta"), decoded.get("content_block")):
            for drawn in ("id", "signature", "stop_sequence", "stop_details"):
                if holder:
                    holder.pop(drawn, None)
            if holder and holder.get("role"):
                holder.pop("type", None), holder.pop("role")
        events.append(decoded)
    return events


WHOLE: dict[str, dict[str, Any]] = {
    "text": {"content": "hi"},
    "nothing": {"content": None},
    "thoughts and tools": {
        "content": "hi",
        "reasoning": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
}


def answer_of(name: str, reason: str) -> dict[str, Any]:
    message = {"role": "assistant", **WHOLE[name]}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    return {"id": "chatcmpl-1", "created": 1, "model": "demo", "choices": [choice], "usage": usage}


def lines_of(chunks: list[dict[str, Any]]) -> list[str]:
    every = [FIRST, *chunks, {**chunk(), "choices": []}]
    return [*(f"data: {json.dumps(one)}\n\n" for one in every), "data: [DONE]\n\n"]


ANSWERS = [(name, reason) for name in WHOLE for reason in ("stop", "length")]


@pytest.fixture(scope="module")
def vllm() -> dict[str, Any]:
    """What it makes of all of these."""
    bodies = [{**BASE, **more} for more in [*REQUESTS.values(), *NEWER.values()]]
    asked = {
        "requests": [(body, chat_of(json.loads(json.dumps(body))).body) for body in bodies],
        "streams": [lines_of(chunks) for chunks in [*STREAMS.values(), *LATER.values()]],
        "whole": [answer_of(*one) for one in ANSWERS],
    }
    said = subprocess.run(
        [sys.executable, "-m", "tests.epd_serve.engine.messages_of_vllm"],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    told: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return told


def test_a_request_means_the_chat_that_vllm_makes_of_it(vllm: dict[str, Any]) -> None:
    for name, ours, theirs in zip([*REQUESTS, *NEWER], vllm["ours"], vllm["theirs"], strict=True):
        if name in NEWER and not vllm["newest"]:
            continue
        if not theirs["tools"]:  # what to choose from nothing
            ours["tool_choice"] = theirs["tool_choice"]
        assert ours == theirs, name


def test_a_stream_becomes_the_events_that_vllm_makes_of_it(vllm: dict[str, Any]) -> None:
    for (name, chunks), said in zip([*STREAMS.items(), *LATER.items()], vllm["streams"], strict=True):
        if name in LATER and not vllm["newest"]:
            continue
        raw = [line.encode() for line in lines_of(chunks)]
        form = MessageForm()
        theirs = events_of(said.encode())
        if not vllm["newest"]:
            theirs[0]["message"]["usage"]["output_tokens"] = 2  # 0.23 says none there
            if name == "a named tool":
                theirs[-2]["delta"]["stop_reason"] = "tool_use"
        assert events_of(b"".join(map(form.events, raw))) == theirs, name
        assert events_of(MessageForm().events(b"".join(raw))) == theirs, f"{name}, all at once"


def test_a_whole_answer_becomes_the_message_that_vllm_makes_of_it(vllm: dict[str, Any]) -> None:
    for one, theirs in zip(ANSWERS, vllm["whole"], strict=True):
        ours = json.loads(MessageForm().whole(200, json.dumps(answer_of(*one)).encode()))
        if not vllm["newest"]:
            theirs["content"] = theirs["content"] or [{"type": "text", "text": ""}]
            if one == ("thoughts and tools", "stop"):
                theirs["stop_reason"] = "tool_use"
        for message in (ours, theirs):
            message.pop("id"), message.pop("stop_sequence", None)
            for block in message["content"]:
                block.pop("signature", None)
        assert ours == theirs, one
