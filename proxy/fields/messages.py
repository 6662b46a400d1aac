"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: a request as the chat that it means.

vLLM's own Messages endpoint cannot be told of features: it drops the `uuid` of an image, has no `return_token_ids`, and
before 0.28 drops `cache_salt` and `vllm_xargs`, too. So stages get a chat, in every layout and from every release, and
whatever holds for chats holds here. What becomes of each field is as in vLLM 0.32 (`entrypoints/anthropic/serving.py`),
but for system messages within the conversation: they join the leading one, since the proxy does not know which
templates take them elsewhere. The types below are what bodies are checked by, and what `/openapi.json` says of them.
No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from epd_serve.errors import RequestError

BILLING = "x-anthropic-billing-header"
"""What a system text of Claude Code begins with that is another one in every request, so that no prefix would be
found again."""
_OF_PROMPTS = ("model", "chat_template_kwargs")
_OF_ANSWERS = ("temperature", "top_p", "top_k", "priority", "watermarking", "vllm_xargs", "max_tokens")
"""Fields of the same name and meaning in a chat, where they are judged."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_IMAGE_TYPE = re.compile(r"image/[A-Za-z0-9.+-]{1,64}")
_MISSING = re.compile(r"missing required field `(\w+)`")


class Base64(Struct, tag="base64"):
    media_type: str
    data: str


class Url(Struct, tag="url"):
    url: str


class Text(Struct, tag="text"):
    text: str


class Image(Struct, tag="image"):
    source: Base64 | Url


class ToolReference(Struct, tag="tool_reference"):
    tool_name: str


class ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | Image | ToolReference] | None = None


class ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class Thinking(Struct, tag="thinking"):
    thinking: str


class RedactedThinking(Struct, tag="redacted_thinking"):
    """What nobody can read but its author; left out."""


class UserMessage(Struct, tag_field="role", tag="user"):
    content: str | list[Text | Image | ToolResult]


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    content: str | list[Text | ToolUse | Thinking | RedactedThinking]


class SystemMessage(Struct, tag_field="role", tag="system"):
    content: str | list[Text]


class Tool(Struct, omit_defaults=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(Struct, tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1024)]


class ThinkingDisabled(Struct, tag="disabled"):
    """Not at all."""


class ThinkingAdaptive(Struct, tag="adaptive"):
    """As deep as the model likes."""


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct):
    messages: Annotated[list[UserMessage | AssistantMessage | SystemMessage], Meta(min_length=1)]
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None


_Asked = TypeVar("_Asked", bound=CountTokensRequest)


class ChatOf(NamedTuple):
    """Attributes:
    body: the chat. media: what errors call its media, in order.
    """

    body: dict[str, Any]
    media: list[str]


def chat_of(body: dict[str, Any]) -> ChatOf:
    """The chat that a request to `/v1/messages` means.

    Raises:
        RequestError: 400, naming the field that is missing or wrong.
    """
    asked = _converted(body, MessagesRequest)
    chat, media = _prompt(body, asked)
    chat |= _given(body, _OF_ANSWERS)
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if (choice := asked.tool_choice) is not None:
        if choice.type == "tool" and not choice.name:
            raise _wrong("tool_choice.name", "is required where type is tool")
        chat["tool_choice"] = _CHOICES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    match asked.thinking:
        case ThinkingEnabled(budget_tokens=budget):
            if budget >= asked.max_tokens:
                raise _wrong("thinking.budget_tokens", "must be less than max_tokens")
            chat["thinking_token_budget"] = budget
        case ThinkingDisabled():
            chat["reasoning_effort"] = "none"
    config = asked.output_config or OutputConfig()
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    if (form := config.format) is not None:
        chat["response_format"] = {"type": form.type, "json_schema": {"name": form.type, "schema": form.schema}}
    return ChatOf(chat, media)


def tokenized_chat_of(body: dict[str, Any]) -> ChatOf:
    """The request to `/tokenize` that counts the tokens of one to `/v1/messages`. Raises as `chat_of`."""
    return _prompt(body, _converted(body, CountTokensRequest))


def _prompt(body: dict[str, Any], asked: CountTokensRequest) -> ChatOf:
    """All that the prompt is made from. System texts are one message, wherever they stand."""
    chat = ChatOf(_given(body, _OF_PROMPTS) | {"messages": []}, [])
    contents = [asked.system or "", *(one.content for one in asked.messages if isinstance(one, SystemMessage))]
    texts = [text for content in contents for text in _texts(content) if not text.startswith(BILLING)]
    if texts:
        _add(chat, "system", content="".join(texts))
    for number, message in enumerate(asked.messages):
        if isinstance(message, UserMessage):
            _add_user(chat, message.content, f"messages[{number}].content")
        elif isinstance(message, AssistantMessage):
            _add_assistant(chat, message.content)
    if asked.tools:
        chat.body["tools"] = [_tool(tool) for tool in asked.tools]
    return chat


def _given(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: body[name] for name in names if body.get(name) is not None}


def _add(chat: ChatOf, role: str, **fields: Any) -> None:
    chat.body["messages"].append({"role": role, **fields})


def _add_user(chat: ChatOf, content: str | list[Text | Image | ToolResult], where: str) -> None:
    """What tools have answered comes first, as in a chat; what the user says about it follows. A tool's text is its
    message; its images, which no template takes there, are a user's behind it."""
    if isinstance(content, str):
        return _add(chat, "user", content=content)
    said: list[tuple[str, Text | Image]] = []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        if not isinstance(block, ToolResult):
            said.append((at, block))
            continue
        answered = block.content or ""
        _add(chat, "tool", tool_call_id=block.tool_use_id, content="\n".join(_texts(answered)))
        blocks = () if isinstance(answered, str) else answered
        _add_parts(chat, [(f"{at}.content[{i}]", one) for i, one in enumerate(blocks) if isinstance(one, Image)])
        if names := [one.tool_name for one in blocks if isinstance(one, ToolReference)]:
            references = [{"type": "tool_reference", "name": name} for name in names]
            _add(chat, "tool", tool_call_id=block.tool_use_id, content=references)
    _add_parts(chat, said)


def _add_parts(chat: ChatOf, blocks: Iterable[tuple[str, Text | Image]]) -> None:
    """A user's message of these blocks, each with its place; none where there is nothing in them."""
    parts: list[dict[str, Any]] = []
    for where, block in blocks:
        if isinstance(block, Image):
            chat.media.append(f"{where}.source")
            parts.append({"type": "image_url", "image_url": {"url": _url(block.source, chat.media[-1])}})
        elif block.text:
            parts.append({"type": "text", "text": block.text})
    if parts:
        _add(chat, "user", content=parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts)


def _add_assistant(chat: ChatOf, content: str | list[Text | ToolUse | Thinking | RedactedThinking]) -> None:
    said: dict[str, Any] = {}
    blocks = [Text(content)] if isinstance(content, str) else content
    if thoughts := [block.thinking for block in blocks if isinstance(block, Thinking)]:
        said["reasoning"] = "".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, ToolUse)]:
        said["tool_calls"] = [
            {"id": call.id, **_function(name=call.name, arguments=json.dumps(call.input, ensure_ascii=False))}
            for call in calls
        ]
    if texts := _texts(blocks):
        said["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    _add(chat, "assistant", **(said or {"content": ""}))


def _texts(content: str | Iterable[Any]) -> list[str]:
    """The texts of a content, empty ones left out."""
    texts = [content] if isinstance(content, str) else [block.text for block in content if isinstance(block, Text)]
    return [text for text in texts if text]


def _url(source: Base64 | Url, where: str) -> str:
    if isinstance(source, Url):
        return source.url
    if not _IMAGE_TYPE.fullmatch(source.media_type):
        raise _wrong(f"{where}.media_type", "must be the MIME type of an image, such as image/png")
    return f"data:{source.media_type};base64,{source.data}"


def _function(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function = msgspec.to_builtins(tool)
    return _function(parameters={"type": "object", **function.pop("input_schema")}, **function)


def _converted(body: dict[str, Any], kind: type[_Asked]) -> _Asked:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        where = path.rstrip("`").lstrip(".")
        if missing := _MISSING.search(what):
            raise _wrong(f"{where}.{missing[1]}".lstrip("."), "is required") from None
        what = what.replace("Expected", "must be").replace("Invalid value", "cannot be").replace("`", "")
        if where.endswith("source.type"):
            what += ": this server stores no files; send base64 or url"
        raise _wrong(where, what) from None


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}.", param=where)
