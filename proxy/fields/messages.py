"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: a request as the chat that it means.

vLLM's own Messages endpoint cannot be told of features: it drops the `uuid` of an image, and before 0.28 `cache_salt`
and `vllm_xargs`, too. So stages get a chat, in every layout and from every release, and whatever holds for chats holds
here. What becomes of each field is as in vLLM 0.32 (`entrypoints/anthropic/serving.py`), but for system messages within
the conversation: they join the leading one, since the proxy does not know which templates take them elsewhere. No I/O.
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
MIN_THINKING_TOKENS = 1024
_OF_PROMPTS = ("model", "chat_template_kwargs")
_OF_ANSWERS = ("temperature", "top_p", "top_k", "priority", "watermarking", "vllm_xargs")
"""Fields of the same name and meaning in a chat, where they are judged."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_IMAGE_TYPE = re.compile(r"image/[A-Za-z0-9.+-]{1,64}")
_MISSING = re.compile(r"missing required field `(\w+)`")


class ChatOf(NamedTuple):
    """Attributes:
    body: the chat. media: what errors call its media, by (message, part) in it.
    """

    body: dict[str, Any]
    media: dict[tuple[int, int], str]


class _Base64(Struct, tag="base64"):
    media_type: str
    data: str


class _Url(Struct, tag="url"):
    url: str


class _File(Struct, tag="file"):
    pass


class _Text(Struct, tag="text"):
    text: str


class _Image(Struct, tag="image"):
    source: _Base64 | _Url | _File


class _ToolReference(Struct, tag="tool_reference"):
    tool_name: str


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text | _Image | _ToolReference] | None = None


class _ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _Thinking(Struct, tag="thinking"):
    thinking: str


class _RedactedThinking(Struct, tag="redacted_thinking"):
    """What nobody can read but its author; left out."""


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text | _Image | _ToolResult]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _ToolUse | _Thinking | _RedactedThinking]


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Choice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingEnabled(Struct, tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=MIN_THINKING_TOKENS)]


class _ThinkingDisabled(Struct, tag="disabled"):
    pass


class _ThinkingAdaptive(Struct, tag="adaptive"):
    """As deep as the model likes."""


class _Format(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _CountTokens(Struct):
    messages: Annotated[list[_User | _Assistant | _System], Meta(min_length=1)]
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _ThinkingEnabled | _ThinkingDisabled | _ThinkingAdaptive | None = None
    output_config: _OutputConfig | None = None


class _Messages(_CountTokens, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None


_Asked = TypeVar("_Asked", bound=_CountTokens)


def chat_of(body: dict[str, Any]) -> ChatOf:
    """The chat that a request to `/v1/messages` means.

    Raises:
        RequestError: 400, naming the field that is missing or wrong.
    """
    asked = _converted(body, _Messages)
    chat, media = _prompt(body, asked)
    chat |= _given(body, _OF_ANSWERS)
    chat["max_tokens"] = asked.max_tokens
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if asked.tool_choice is not None:
        chat |= _tool_choice(asked.tool_choice)
    if isinstance(asked.thinking, _ThinkingEnabled):
        if asked.thinking.budget_tokens >= asked.max_tokens:
            raise _wrong("thinking.budget_tokens", "must be less than max_tokens")
        chat["thinking_token_budget"] = asked.thinking.budget_tokens
    if isinstance(asked.thinking, _ThinkingDisabled):
        chat["reasoning_effort"] = "none"
    if (config := asked.output_config) is not None:
        if config.effort is not None:
            chat["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": config.format.type, "schema": config.format.schema}
            chat["response_format"] = {"type": config.format.type, "json_schema": schema}
    return ChatOf(chat, media)


def tokenized_chat_of(body: dict[str, Any]) -> ChatOf:
    """The request to `/tokenize` that counts the tokens of one to `/v1/messages`. Raises as `chat_of`."""
    return _prompt(body, _converted(body, _CountTokens))


def _prompt(body: dict[str, Any], asked: _CountTokens) -> ChatOf:
    """All that the prompt is made from."""
    messages = _Conversation()
    messages.add_system(asked)
    for number, message in enumerate(asked.messages):
        where = f"messages[{number}].content"
        if isinstance(message, _User):
            messages.add_user(message, where)
        elif isinstance(message, _Assistant):
            messages.add_assistant(message)
    chat = _given(body, _OF_PROMPTS)
    chat["messages"] = messages.messages
    if asked.tools:
        chat["tools"] = [_tool(tool) for tool in asked.tools]
    return ChatOf(chat, messages.media)


def _given(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: body[name] for name in names if body.get(name) is not None}


class _Conversation:
    """A chat's messages, as far as they are known."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.media: dict[tuple[int, int], str] = {}

    def add_system(self, asked: _CountTokens) -> None:
        """One message of all system texts, wherever they stand."""
        contents = [asked.system or "", *(one.content for one in asked.messages if isinstance(one, _System))]
        texts = [text for content in contents for text in _texts(content) if not text.startswith(BILLING)]
        if system := "".join(texts):
            self.messages.append({"role": "system", "content": system})

    def add_user(self, message: _User, where: str) -> None:
        """What tools have answered comes first, as in a chat; what the user says about it follows."""
        if isinstance(message.content, str):
            self.messages.append({"role": "user", "content": message.content})
            return
        blocks: list[tuple[str, _Text | _Image]] = []
        for number, block in enumerate(message.content):
            if isinstance(block, _ToolResult):
                self._add_result(block, f"{where}[{number}].content")
            else:
                blocks.append((f"{where}[{number}]", block))
        self._add_parts(blocks)

    def add_assistant(self, message: _Assistant) -> None:
        if isinstance(message.content, str):
            self.messages.append({"role": "assistant", "content": message.content})
            return
        said: dict[str, Any] = {}
        blocks = message.content
        if thoughts := [block.thinking for block in blocks if isinstance(block, _Thinking)]:
            said["reasoning"] = "".join(thoughts)
        if calls := [_call(block) for block in blocks if isinstance(block, _ToolUse)]:
            said["tool_calls"] = calls
        if texts := [block.text for block in blocks if isinstance(block, _Text) and block.text]:
            parts = [{"type": "text", "text": text} for text in texts]
            said["content"] = texts[0] if len(texts) == 1 else parts
        self.messages.append({"role": "assistant", **(said or {"content": ""})})

    def _add_result(self, result: _ToolResult, where: str) -> None:
        """A tool's text is its message; its images, which no template takes there, are a user's behind it."""
        content = result.content or ""
        text = "\n".join(_texts(content))
        self.messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})
        if isinstance(content, str):
            return
        self._add_parts((f"{where}[{i}]", block) for i, block in enumerate(content) if isinstance(block, _Image))
        names = [block.tool_name for block in content if isinstance(block, _ToolReference)]
        if names:
            references = [{"type": "tool_reference", "name": name} for name in names]
            self.messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": references})

    def _add_parts(self, blocks: Iterable[tuple[str, _Text | _Image]]) -> None:
        """A user's message of these blocks, each with its place; none where there is nothing in them."""
        parts: list[dict[str, Any]] = []
        for where, block in blocks:
            if isinstance(block, _Image):
                self.media[len(self.messages), len(parts)] = f"{where}.source"
                parts.append({"type": "image_url", "image_url": {"url": _url(block, f"{where}.source")}})
            elif block.text:
                parts.append({"type": "text", "text": block.text})
        if len(parts) == 1 and "text" in parts[0]:
            self.messages.append({"role": "user", "content": parts[0]["text"]})
        elif parts:
            self.messages.append({"role": "user", "content": parts})


def _texts(content: str | list[Any]) -> list[str]:
    """The texts of a content, empty ones left out."""
    texts = [content] if isinstance(content, str) else [block.text for block in content if isinstance(block, _Text)]
    return [text for text in texts if text]


def _url(image: _Image, where: str) -> str:
    source = image.source
    if isinstance(source, _File):
        raise _wrong(f"{where}.type", "cannot be file: this server stores no files; send base64 or url")
    if isinstance(source, _Url):
        return source.url
    if not _IMAGE_TYPE.fullmatch(source.media_type):
        raise _wrong(f"{where}.media_type", "must be the MIME type of an image, such as image/png")
    return f"data:{source.media_type};base64,{source.data}"


def _call(block: _ToolUse) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: _Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": {"type": "object", **tool.input_schema},
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: _Choice) -> dict[str, Any]:
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type != "tool":
        return {"tool_choice": _CHOICES[choice.type], **parallel}
    if not choice.name:
        raise _wrong("tool_choice.name", "is required where type is tool")
    return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **parallel}


def _converted(body: dict[str, Any], kind: type[_Asked]) -> _Asked:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        where = path.rstrip("`").lstrip(".")
        if missing := _MISSING.search(what):
            raise _wrong(f"{where}.{missing[1]}".lstrip("."), "is required") from None
        what = what.replace("Expected", "must be").replace("Invalid value", "cannot be").replace("`", "")
        raise _wrong(where, what) from None


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}.", param=where)
