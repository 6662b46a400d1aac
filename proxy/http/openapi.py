"""What the OpenAPI document at `/openapi.json` says beside the routes, which FastAPI reads; and the paths of a plain
vLLM that this server does not serve.

Schemas say what the proxy judges or makes. Those of `/v1/messages` and of what the server says of itself are made from
the types that do it. Of fields that are not here those pass that vLLM has (`proxy/fields/rules.py`); vLLM's own
judgement is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.routing import compile_path

from epd_serve.errors import NotFoundError
from proxy.config.settings import ProxySettings
from proxy.fields.messages import CountTokensRequest, MessagesRequest
from proxy.fields.rules import OUR_XARGS, REFUSED, XARGS_REFUSED
from proxy.http import status
from proxy.request.client import HEADER
from proxy.request.parse import Endpoint

Json = dict[str, Any]

NOT_FOUND = "No such model."
MODEL_ERRORS = {
    400: "A field is wrong; `param` names it. Or two instances failed alike on this body (`same_fault`).",
    404: NOT_FOUND,
    408: "The body came too slowly (`body_too_slow`).",
    413: "The body, a media item or what the request takes of the server's memory is too large.",
    422: "Instances died under this very body (`poisonous_request`); do not repeat it.",
    429: "Too many requests wait (`overloaded`), or this key or tenant has its share, or has used up its requests or "
    "tokens per minute (`rate_limit_exceeded`); try again after `Retry-After` seconds.",
    502: "A stage failed, and so did the retries.",
    503: "No live instance of a role (`no_instance`), media that no encoder produced (`not_encoded`), no room for what "
    "the request needs next (`memory_full`, `bodies_full`, `fetches_full`), or the server is coming to an end "
    "(`draining`); try again after `Retry-After` seconds.",
    504: f"A deadline ran out: one of the server's, or the client's own, which is in the header `{HEADER}`.",
}
"""Of requests to a model, by HTTP status."""
OPERATIONS = {
    Endpoint.CHAT: ("createChatCompletion", "ChatRequest"),
    Endpoint.COMPLETIONS: ("createCompletion", "CompletionRequest"),
    Endpoint.RESPONSES: ("createResponse", "ResponseRequest"),
    Endpoint.TOKENIZE: ("tokenize", "TokenizeRequest"),
    Endpoint.DETOKENIZE: ("detokenize", "DetokenizeRequest"),
    Endpoint.MESSAGES: ("createMessage", "MessagesRequest"),
    Endpoint.COUNT_TOKENS: ("countMessageTokens", "CountTokensRequest"),
}
"""Endpoint → name of the operation, and of the schema of its body."""
ANSWERS = {
    Endpoint.TOKENIZE: "The tokens, and how many.",
    Endpoint.DETOKENIZE: "The text.",
    Endpoint.COUNT_TOKENS: "How many tokens the prompt has.",
}
MADE_OF = (MessagesRequest, CountTokensRequest, status.Models, status.Version, status.Live, status.Health, status.Ready)


def reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def content(schema: Json) -> Json:
    """What a body or an answer holds, as JSON."""
    return {"application/json": {"schema": schema}}


def answers(statuses: Mapping[int, str], schema: str = "Error") -> dict[int | str, Json]:
    """Answers of that schema, by HTTP status, with what they mean."""
    return {code: {"description": what, "content": content(reference(schema))} for code, what in statuses.items()}


def schemas(settings: ProxySettings) -> Json:
    """All that the document refers to, for a proxy with these settings."""
    return {**_openai(settings), **_of_types()}


def _of_types() -> Json:
    _, made = msgspec.json.schema_components(MADE_OF, ref_template="#/components/schemas/{name}")
    more = {"model": reference("Model"), **{name: _SHARED[name] for name in ("temperature", "top_p", "vllm_xargs")}}
    made["MessagesRequest"]["properties"] |= {**more, "top_k": _INTEGER}
    made["MessagesRequest"]["required"].append("model")
    made["CountTokensRequest"]["properties"]["model"] = reference("Model")
    return made


def _object(properties: Json, *required: str, **more: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _any_of(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def _list(schema: Json, **more: Any) -> Json:
    return {"type": "array", "items": schema, "minItems": 1, **more}


def _part(kind: str, key: str, value: Json) -> Json:
    return _object({"type": {"const": kind}, key: value}, "type", key, additionalProperties=False)


def _refused(*names: str) -> Json:
    """Fields that may ask for nothing only, and why."""
    return {name: {"enum": [*REFUSED[name].harmless, None], "description": REFUSED[name].reason} for name in names}


_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_INTEGER: Json = {"type": ["integer", "null"]}
_COUNT: Json = {**_INTEGER, "minimum": 1}
_FLAG: Json = {"type": ["boolean", "null"]}
_OBJECT: Json = {"type": ["object", "null"]}
_URL: Json = {"type": "string", "minLength": 1, "description": "data:, https:, http: or file: as the server allows."}
_BY_URL = _any_of(_object({"url": _URL}, "url"), _URL)
_SHARED: Json = {
    "model": reference("Model"),
    "stream": _FLAG,
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "seed": _INTEGER,
    "priority": {"type": "integer", "description": "Lower is sooner."},
    "vllm_xargs": {
        **_OBJECT,
        "propertyNames": {"not": _any_of({"enum": sorted(XARGS_REFUSED)}, {"pattern": f"^{OUR_XARGS}"})},
    },
}
_SAMPLING: Json = {**_SHARED, "max_tokens": _COUNT, "n": reference("Choices"), "user": _TEXT_OR_NULL}


def _openai(settings: ProxySettings) -> Json:
    tokens, several = _list({"type": "integer"}), settings.max_sequences
    parts = [_part(key, key, _BY_URL) for key in ("image_url", "video_url", "audio_url")]
    audio = _object({"data": {**_TEXT, "minLength": 1}, "format": _TEXT}, "data", "format")
    tool = _object({"type": _TEXT, "function": {"type": "object"}}, "type")
    error = {"message": _TEXT, "type": _TEXT}
    model, messages = {"model": reference("Model")}, {"messages": _list(reference("Message"))}
    turn = {
        "role": {"enum": ["system", "developer", "user"]},
        "content": _any_of(_TEXT, _list(reference("ResponsePart"))),
    }
    return {
        "Error": _object({"error": _object({**error, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}, *error)}, "error"),
        "AnthropicError": _object({"type": {"const": "error"}, "error": _object(error, *error)}, "type", "error"),
        "StreamEvent": _object(
            {"event": _TEXT, "data": _TEXT},
            "data",
            description="One server-sent event of the stream; its data is JSON, but for the last `[DONE]`.",
        ),
        "Part": _any_of(_part("text", "text", _TEXT), *parts, _part("input_audio", "input_audio", audio)),
        "Message": _object(
            {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": _any_of(_TEXT, _list(reference("Part")), {"type": "null"}),
            },
            "role",
        ),
        "ChatRequest": _object(
            {
                **_SAMPLING,
                **messages,
                "max_completion_tokens": _COUNT,
                "tools": _any_of(_list(tool), {"type": "null"}),
                "response_format": _OBJECT,
                "logprobs": _FLAG,
                "top_logprobs": {**_INTEGER, "minimum": 0, "maximum": 20},
            },
            *("model", "messages"),
        ),
        "CompletionRequest": _object(
            {**_SAMPLING, "prompt": reference("Prompt"), "echo": _FLAG, "logprobs": {**_INTEGER, "minimum": 0}},
            *("model", "prompt"),
        ),
        "ResponsePart": _any_of(_part("input_text", "text", _TEXT), _part("input_image", "image_url", _URL)),
        "ResponseRequest": _object(
            {
                **_SHARED,
                "input": _any_of(_TEXT, _list(_object(turn, *turn))),
                "instructions": _TEXT_OR_NULL,
                "max_output_tokens": _COUNT,
                "truncation": {"enum": ["auto", "disabled", None]},
                **_refused("background", "store", "previous_response_id"),
            },
            *("model", "input"),
        ),
        "TokenizeRequest": _any_of(
            _object({**model, "prompt": _TEXT, "add_special_tokens": {"type": "boolean"}}, "prompt"),
            _object({**model, **messages}, "messages"),
        ),
        "DetokenizeRequest": _object(
            {**model, "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}, "tokens"
        ),
        "Instances": _object({"instances": {"type": "array", "items": {"type": "object"}}}, "instances"),
        "Model": {"enum": list(settings.served_models)},
        "Choices": {**_COUNT, "maximum": settings.max_n},
        "Prompt": {
            **_any_of(_TEXT, tokens, _list(_TEXT, maxItems=several), _list(tokens, maxItems=several)),
            "description": f"Of several prompts, with `n` for each, {several} answers at most.",
        },
    }


class Unserved(NamedTuple):
    """Attributes: paths: of vLLM 0.32. why: it is not served here. instead: what serves it."""

    paths: list[str]
    why: str
    instead: str


PLAIN = "`vllm serve` beside this server"
UNSERVED = (
    Unserved(
        ["/cohere/v2/chat"],
        "it asks in another form than OpenAI's and Anthropic's",
        "`/v1/chat/completions` or `/v1/messages` here, in every layout; " + PLAIN,
    ),
    Unserved(
        "/v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank".split(),
        "models that answer without decoding have nothing to disaggregate",
        PLAIN,
    ),
    Unserved(
        ["/v1/audio/transcriptions", "/v1/audio/translations"],
        "models of encoder and decoder keep state that no stage hands over",
        "`/v1/chat/completions` here with `input_audio`, for models that take it in chats; " + PLAIN,
    ),
    Unserved(
        ["/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"],
        "no response is kept: each request may go to other instances",
        "`/v1/responses` here with the whole conversation as `input`",
    ),
    Unserved(
        (
            "/v1/chat/completions/batch /v1/chat/completions/render /v1/chat/completions/derender "
            "/v1/completions/render /v1/completions/derender /v1/messages/render /v1/responses/render "
            "/inference/v1/generate /generative_scoring /v1/systemone /invocations"
        ).split(),
        "it speaks with one engine about its tokens or its inner forms",
        "`/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages` and `/tokenize` here; " + PLAIN,
    ),
    Unserved(
        ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
        "neither a prompt's hash nor a feature's key says which adapter computed it",
        PLAIN,
    ),
    Unserved(
        (
            "/abort_requests /collective_rpc /fault_tolerance/apply /fault_tolerance/status /finish_weight_update "
            "/get_world_size /init_weight_transfer_engine /is_paused /is_scaling_elastic_ep /is_sleeping "
            "/kv_event_sources /load /pause /ping /release_kv_cache_memory /reset_encoder_cache /reset_mm_cache "
            "/reset_prefix_cache /resume /scale_elastic_ep /server_info /shutdown_weight_transfer_engine /sleep "
            "/start_draft_weight_update /start_profile /start_weight_update /stop_profile /tokenizer_info "
            "/update_weight_version /update_weights /wake_up /weight_checker /weight_info"
        ).split(),
        "it is for who runs one engine, and nothing for clients",
        "`epd-serve status`, `drain`, `restart`, `relayout` and the admin listener",
    ),
)


_UNSERVED = [(compile_path(path)[0], group) for group in UNSERVED for path in group.paths]


def unserved(path: str) -> NotFoundError | None:
    """The answer to a request for this path; None where vLLM has no such path either."""
    for pattern, group in _UNSERVED:
        if pattern.match(path.rstrip("/")):
            return NotFoundError(f"{path} is not served: {group.why}. Use {group.instead}.", code="not_served")
    return None
