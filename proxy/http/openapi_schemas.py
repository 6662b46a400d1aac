"""Schemas of bodies and answers, as far as the proxy judges or makes them. Values only; limits come in (`limited`).

Of fields that are not here those pass that vLLM has (`proxy/fields/sieve.py`); vLLM's own judgement is not repeated
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.fields.rules import OUR_XARGS, XARGS_REFUSED

Json = dict[str, Any]
ERROR = "Error"
ANTHROPIC_ERROR = "AnthropicError"


def reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Json, *required: str, closed: bool = False) -> Json:
    schema: Json = {"type": "object", "properties": properties, "required": list(required)}
    return {**schema, "additionalProperties": False} if closed else schema


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Json) -> Json:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT: Json = {"type": "string"}
COUNT: Json = {"type": ["integer", "null"], "minimum": 1}
FLAG: Json = {"type": ["boolean", "null"]}
URL: Json = {"type": "string", "minLength": 1, "description": "data:, https:, http: or file: as the server allows."}
BY_URL = {"anyOf": [_object({"url": URL}, "url"), URL]}
AUDIO = _object({"data": {"type": "string", "minLength": 1}, "format": TEXT}, "data", "format")


def _part(kind: str, key: str, value: Json) -> Json:
    return _object({"type": {"const": kind}, key: value}, "type", key, closed=True)


def _block(kind: str, properties: Json, *required: str) -> Json:
    return _object({"type": {"const": kind}, **properties}, "type", *required)


def _anthropic_message(role: str, blocks: str) -> Json:
    content = {"anyOf": [TEXT, {"type": "array", "items": reference(blocks)}]}
    return _object({"role": {"const": role}, "content": content}, "role", "content")


BLOCKS = {
    "text": _block("text", {"text": TEXT}, "text"),
    "image": _block("image", {"source": reference("ImageSource")}, "source"),
    "tool_result": _block(
        "tool_result",
        {"tool_use_id": TEXT, "content": {"anyOf": [TEXT, _list(reference("ToolResultBlock"))]}},
        "tool_use_id",
    ),
    "tool_use": _block("tool_use", {"id": TEXT, "name": TEXT, "input": {"type": "object"}}, "id", "name", "input"),
    "thinking": _block("thinking", {"thinking": TEXT, "signature": TEXT}, "thinking"),
    "redacted_thinking": _block("redacted_thinking", {"data": TEXT}),
}
COUNTED: Json = {
    "model": reference("Model"),
    "messages": _list(reference("AnthropicMessage")),
    "system": {"anyOf": [TEXT, _list(BLOCKS["text"]), {"type": "null"}]},
    "tools": _or_null(_list(_object({"name": TEXT, "input_schema": {"type": "object"}}, "name", "input_schema"))),
}
SHARED: Json = {
    "model": reference("Model"),
    "stream": FLAG,
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "seed": {"type": ["integer", "null"]},
    "priority": {"type": "integer", "description": "Lower is sooner."},
    "vllm_xargs": {
        "type": ["object", "null"],
        "propertyNames": {"not": {"anyOf": [{"enum": sorted(XARGS_REFUSED)}, {"pattern": f"^{OUR_XARGS}"}]}},
    },
}
SAMPLING: Json = {**SHARED, "max_tokens": COUNT, "n": reference("Choices"), "user": {"type": ["string", "null"]}}

SCHEMAS: Json = {
    ERROR: _object(
        {
            "error": _object(
                {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": {}},
                *("message", "type", "param", "code"),
            )
        },
        "error",
    ),
    ANTHROPIC_ERROR: _object(
        {"type": {"const": "error"}, "error": _object({"type": TEXT, "message": TEXT}, "type", "message")},
        *("type", "error"),
    ),
    "StreamEvent": {
        **_object({"event": TEXT, "data": TEXT}, "data"),
        "description": "One server-sent event of the stream; its data is JSON, but for the last `[DONE]`.",
    },
    "Part": {
        "anyOf": [
            _part("text", "text", TEXT),
            _part("image_url", "image_url", BY_URL),
            _part("video_url", "video_url", BY_URL),
            _part("audio_url", "audio_url", BY_URL),
            _part("input_audio", "input_audio", AUDIO),
        ]
    },
    "Message": _object(
        {
            "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [TEXT, _list(reference("Part")), {"type": "null"}]},
        },
        "role",
    ),
    "ChatRequest": _object(
        {
            **SAMPLING,
            "messages": _list(reference("Message")),
            "max_completion_tokens": COUNT,
            "tools": _or_null(_list(_object({"type": TEXT, "function": {"type": "object"}}, "type"))),
            "response_format": {"type": ["object", "null"]},
            "logprobs": FLAG,
            "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        },
        *("model", "messages"),
    ),
    "CompletionRequest": _object(
        {
            **SAMPLING,
            "prompt": reference("Prompt"),
            "echo": FLAG,
            "logprobs": {"type": ["integer", "null"], "minimum": 0},
        },
        *("model", "prompt"),
    ),
    "ResponsePart": {
        "anyOf": [_part("input_text", "text", TEXT), _part("input_image", "image_url", URL)],
    },
    "ResponseRequest": _object(
        {
            **SHARED,
            "input": {
                "anyOf": [
                    TEXT,
                    _list(
                        _object(
                            {
                                "role": {"type": "string", "enum": ["system", "developer", "user"]},
                                "content": {"anyOf": [TEXT, _list(reference("ResponsePart"))]},
                            },
                            *("role", "content"),
                        )
                    ),
                ]
            },
            "instructions": {"type": ["string", "null"]},
            "max_output_tokens": COUNT,
            "truncation": {"enum": ["auto", "disabled", None]},
            "background": {"enum": [False, None], "description": "This server keeps no responses."},
            "store": {"enum": [False, None], "description": "This server keeps no responses."},
            "previous_response_id": {"type": "null", "description": "This server keeps no responses."},
        },
        *("model", "input"),
    ),
    "TokenizeRequest": {
        "anyOf": [
            _object({"model": reference("Model"), "prompt": TEXT, "add_special_tokens": {"type": "boolean"}}, "prompt"),
            _object({"model": reference("Model"), "messages": _list(reference("Message"))}, "messages"),
        ]
    },
    "DetokenizeRequest": _object(
        {"model": reference("Model"), "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}, "tokens"
    ),
    "ImageSource": {
        "anyOf": [
            _block("base64", {"media_type": TEXT, "data": TEXT}, "media_type", "data"),
            _block("url", {"url": URL}, "url"),
        ]
    },
    "ToolResultBlock": {"anyOf": [BLOCKS["text"], BLOCKS["image"]]},
    "UserBlock": {"anyOf": [BLOCKS["text"], BLOCKS["image"], BLOCKS["tool_result"]]},
    "AssistantBlock": {"anyOf": [BLOCKS["text"], BLOCKS["tool_use"], BLOCKS["thinking"], BLOCKS["redacted_thinking"]]},
    "AnthropicMessage": {
        "anyOf": [_anthropic_message("user", "UserBlock"), _anthropic_message("assistant", "AssistantBlock")]
    },
    "MessagesRequest": _object(
        {
            **COUNTED,
            "max_tokens": {"type": "integer", "minimum": 1},
            "stream": FLAG,
            "stop_sequences": {"type": ["array", "null"], "items": TEXT},
            **{name: SHARED[name] for name in ("temperature", "top_p", "vllm_xargs")},
            "top_k": {"type": ["integer", "null"]},
        },
        *("model", "messages", "max_tokens"),
    ),
    "CountTokensRequest": _object(COUNTED, "messages"),
    "ModelCard": _object(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": TEXT,
            "role": {**TEXT, "description": "What this server is to a router before it, in llm-d's words."},
            "root": {**TEXT, "description": "The name of the model itself."},
            "max_model_len": {"type": "integer", "description": "Context length in tokens, where it is known."},
        },
        *("id", "object", "created", "owned_by", "root"),
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(reference("ModelCard"))}, "object", "data"),
    "Version": _object({"version": TEXT}, "version"),
    "Live": _object({"status": {"const": "alive"}}, "status"),
    "Health": _object({"status": {"enum": ["ok", "paused", "unavailable", "draining"]}}, "status"),
    # What is not required is left out where the status table is closed to those who ask.
    "Ready": _object(
        {
            "status": {"enum": ["ready", "degraded", "paused", "unavailable", "draining"]},
            "kinds": {
                "type": "object",
                "additionalProperties": _object({"served": {"type": "boolean"}, "how": TEXT}, "served"),
            },
            "missing": {"type": "array", "items": TEXT, "description": "Roles of the layout without a live instance."},
            "waiting": {"type": "array", "items": TEXT, "description": "Instances that are known and not live."},
            "down": {
                "type": "object",
                "additionalProperties": TEXT,
                "description": "Tasks that feed the status table and do not run, and why.",
            },
        },
        *("status", "kinds"),
    ),
    "Instances": _object({"instances": {"type": "array", "items": {"type": "object"}}}, "instances"),
}


def limited(models: Sequence[str], *, max_n: int, max_sequences: int) -> Json:
    """The schemas that follow from what a server is configured with. `SCHEMAS` refer to them."""
    tokens = _list({"type": "integer"})
    several = [{**_list(prompt), "maxItems": max_sequences} for prompt in (TEXT, tokens)]
    return {
        "Model": {"type": "string", "enum": list(models)},
        "Choices": {**COUNT, "maximum": max_n},
        "Prompt": {
            "anyOf": [TEXT, tokens, *several],
            "description": f"Of several prompts, with `n` for each, {max_sequences} answers at most.",
        },
    }
