"""What the installed vLLM's own Messages API makes of requests and answers, in a process of its own. JSON to JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse

SERVER = SimpleNamespace(stop_reason_map={"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"})
"""What 0.23's methods ask of the object that they belong to; later ones nothing."""
TOLD = {"messages", "tools", "tool_choice", "stop", "temperature", "top_k", "top_p", "stream", "stream_options",
        "max_tokens", "reasoning_effort", "thinking_token_budget", "response_format",
        "chat_template_kwargs"}  # fmt: skip


def chat(request: Any) -> dict[str, Any]:
    dumped = request.model_dump(include=TOLD)
    return {
        **dumped,
        "stop": dumped["stop"] or None,
        "messages": json.loads(json.dumps(request.messages, default=list)),
    }


def theirs(body: dict[str, Any]) -> dict[str, Any]:
    request = AnthropicMessagesRequest.model_validate(body)
    if hasattr(AnthropicServingMessages, "to_chat_completion_request"):
        return chat(AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=True))
    return chat(AnthropicServingMessages._convert_anthropic_to_openai_request(request))


async def streamed(chunks: list[str]) -> str:
    async def lines() -> AsyncIterator[str]:
        for one in chunks:
            yield one

    return "".join([one async for one in AnthropicServingMessages.message_stream_converter(SERVER, lines())])


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    response = ChatCompletionResponse.model_validate(answer)
    return AnthropicServingMessages.messages_full_converter(SERVER, response).model_dump(exclude_none=True)


def main() -> None:
    asked = json.load(sys.stdin)
    told = {
        "newest": hasattr(AnthropicServingMessages, "to_chat_completion_request"),
        "theirs": [theirs(body) for body, _ in asked["requests"]],
        "ours": [chat(ChatCompletionRequest.model_validate(body)) for _, body in asked["requests"]],
        "streams": [asyncio.run(streamed(chunks)) for chunks in asked["streams"]],
        "whole": [whole(answer) for answer in asked["whole"]],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
