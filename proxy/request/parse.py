"""Makes a `ParsedRequest` of a body of OpenAI's API or Anthropic's: what the proxy must know, and what it must not let
through.

Only fields that are known go on (`proxy/fields/rules.py`); those that could kill an engine or fetch another tenant's
feature are refused by name. Checked here are the fields that the proxy acts on; their values otherwise
are vLLM's to judge. No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from msgspec import Struct

from epd_serve.errors import NotFoundError, RequestError
from proxy import strict_json
from proxy.config.settings import ProxySettings
from proxy.fields.messages import chat_of, tokenized_chat_of
from proxy.fields.parts import MediaRef, media_refs
from proxy.fields.rules import MEDIA_OPTIONS, MESSAGES_MODEL, TEMPLATE_KWARGS_REFUSED, Sieve, rules_of

REPETITION_LIMITS = {"max_pattern_size": 64, "min_pattern_size": 64, "min_count": 16}
"""Bounds of `repetition_detection`, which vLLM's scheduler looks for in Python after every token, all others waiting
(0.32, `v1/core/sched/utils.py`): at most some 30,000 comparisons."""


_LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
_OBJECTS = frozenset({*MEDIA_OPTIONS, "chat_template_kwargs"})
_GRAMMARS = frozenset({"json_object", "json_schema", "structural_tag"})


class Endpoint(StrEnum):
    """The endpoints that reach a model."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"

    @property
    def generates(self) -> bool:
        """Its requests pass through the stages; the others are answered by any tokenizer."""
        return self not in (Endpoint.TOKENIZE, Endpoint.DETOKENIZE, Endpoint.COUNT_TOKENS)

    @property
    def is_anthropic(self) -> bool:
        """It speaks Anthropic's API; its requests are chats to the stages."""
        return self in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS)


_MODELS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "completion",
    Endpoint.RESPONSES: "response",
    Endpoint.DETOKENIZE: "detokenize",
}


_COMPARED = {
    Endpoint.CHAT: ("prompt_logprobs", "top_logprobs"),
    Endpoint.COMPLETIONS: ("prompt_logprobs", "logprobs"),
}
"""Numbers that vLLM 0.23 compares before it looks at their types."""


class ParsedRequest(Struct, frozen=True):
    """A checked client request.

    Attributes:
        endpoint: of the stages that it is for. body: for it; the client's own JSON object but for Anthropic's
            endpoints. Treated as read-only.
        media: its media items, in prompt order.
        needs_fused: the field that only an instance which prefills and decodes can serve, or None.
        dropped: what no rule knows and was left out, as labels of `epd_proxy_fields_dropped`.
    """

    endpoint: Endpoint
    body: Mapping[str, Any]
    model: str
    stream: bool
    media: tuple[MediaRef, ...]
    needs_fused: str | None
    dropped: tuple[str, ...] = ()

    @property
    def processor_options(self) -> dict[str, object]:
        """Options that change what an encoder makes of the same bytes."""
        return {name: self.body[name] for name in MEDIA_OPTIONS if self.body.get(name) is not None}


def parse(endpoint: Endpoint, raw: bytes | bytearray, settings: ProxySettings) -> ParsedRequest:
    """Parse and check a request body.

    Raises:
        RequestError: 400, `param` names the field. NotFoundError: 404 `model_not_found`.
    """
    body = _decode(raw)
    sieve = Sieve(settings.strict_fields)
    called: list[str] = []
    if endpoint.is_anthropic:
        sieve.body(body, rules_of(MESSAGES_MODEL, media_options=settings.trust_request_mm_kwargs))
        generates = endpoint.generates
        body, called = chat_of(body) if generates else tokenized_chat_of(body)
        endpoint = Endpoint.CHAT if generates else Endpoint.TOKENIZE
    rules = rules_of(_model_of(endpoint, body), settings.vllm_version, media_options=settings.trust_request_mm_kwargs)
    sieve.body(body, rules)
    if xargs := _object(body, "vllm_xargs"):
        sieve.xargs(xargs, settings.xargs)
    for name in _OBJECTS:
        if name in body:
            _object(body, name)
    if "chat_template_kwargs" in body:
        _template_variables(_object(body, "chat_template_kwargs"))
    if not endpoint.generates and body.get("model") is None:
        body["model"] = settings.served_models[0]  # there is one tokenizer
    model = _model(body, settings)
    for name in _LENGTHS:
        if name in body:
            _integer(body, name, 1, None)
    _integer(body, "n", 1, settings.max_n)
    if "repetition_detection" in body:
        detection = _object(body, "repetition_detection")
        for name, most in REPETITION_LIMITS.items():
            _integer(detection, name, 0, most, within="repetition_detection.")
    for name in _COMPARED.get(endpoint, ()):
        if isinstance(body.get(name), str | list | dict):
            raise RequestError(f"{name} must be a number.", param=name)
    if endpoint is Endpoint.RESPONSES and body.get("truncation") is None:
        body.pop("truncation", None)  # vLLM 0.32 takes null for it, and breaks off when it repeats it in a stream
    _one_choice_of_tokens(body)
    stream = _boolean(body, "stream") and endpoint.generates
    media = _media(endpoint, body)
    if called:
        media = tuple(replace(ref, param=name) for ref, name in zip(media, called, strict=True))
    _check_modalities(media, settings)
    return ParsedRequest(endpoint, body, model, stream, media, _needs_fused(endpoint, body), tuple(sieve.dropped))


def _model_of(endpoint: Endpoint, body: Mapping[str, Any]) -> str:
    """Which of vLLM's requests a body is, as `proxy/fields/vllm_fields.py` calls it."""
    if endpoint is Endpoint.TOKENIZE:
        return "tokenize_chat" if "messages" in body else "tokenize_text"
    return _MODELS[endpoint]


def _media(endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[MediaRef, ...]:
    """The media of the prompt, whose form is checked as far as it must be known."""
    if endpoint is Endpoint.RESPONSES:
        return _response_media(body)
    if endpoint is Endpoint.CHAT or (endpoint is Endpoint.TOKENIZE and "messages" in body):
        return media_refs(_messages(body))
    if endpoint is Endpoint.DETOKENIZE:
        _token_ids(body)
    else:
        _prompt(body)
    return ()


def _decode(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        body = strict_json.decode(raw)
    except RecursionError:
        raise RequestError("The request body is nested too deeply.", code="invalid_json") from None
    except ValueError as error:
        param = error.path if isinstance(error, strict_json.LoneSurrogateError) else None
        raise RequestError(f"The request body is not valid JSON: {error}", param=param, code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_json")
    return body


def _model(body: Mapping[str, Any], settings: ProxySettings) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError(f"model is required; this server has {', '.join(settings.served_models)}.", param="model")
    if model not in settings.served_models:
        raise NotFoundError(
            f"The model `{model}` does not exist; this server has {', '.join(settings.served_models)}.",
            param="model",
            code="model_not_found",
        )
    return model


def _messages(body: Mapping[str, Any]) -> list[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list.", param="messages")
    return messages


def _check_modalities(media: tuple[MediaRef, ...], settings: ProxySettings) -> None:
    for ref in media:
        if settings.modalities is not None and ref.modality.value not in settings.modalities:
            accepted = ", ".join(sorted(settings.modalities)) or "text only"
            raise RequestError(
                f"{ref.param}: the model {settings.served_models[0]} does not take {ref.modality.value} (it takes "
                f"{accepted}).",
                param=ref.param,
                code="unsupported_modality",
            )


def _response_media(body: Mapping[str, Any]) -> tuple[MediaRef, ...]:
    value = body.get("input")
    if isinstance(value, str):
        return ()
    if not isinstance(value, list) or not value:
        raise RequestError("input must be a string or a non-empty list.", param="input")
    return media_refs(value, "input")


def _token_ids(body: Mapping[str, Any]) -> None:
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 63 for token in tokens):
        raise RequestError("tokens must be a list of token ids, which are integers from 0.", param="tokens")


def _prompt(body: Mapping[str, Any]) -> None:
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list) or prompt == []:
        raise RequestError("prompt must be a string or a non-empty list.", param="prompt")


def _one_choice_of_tokens(body: Mapping[str, Any]) -> None:
    """Where a list of tokens and a grammar agree on none, vLLM's engine ends the request with a 500."""
    form, outputs = body.get("response_format"), body.get("structured_outputs")
    grammar = isinstance(outputs, dict) and any(value is not None for value in outputs.values())
    grammar = grammar or (isinstance(form, dict) and str(form.get("type")) in _GRAMMARS)
    if grammar and body.get("allowed_token_ids") is not None:
        raise RequestError(
            "allowed_token_ids cannot be used with response_format or structured_outputs: both say which tokens may "
            "come next.",
            param="allowed_token_ids",
        )


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object.", param=name)
    return value


def _template_variables(kwargs: dict[str, Any]) -> None:
    for name in sorted(TEMPLATE_KWARGS_REFUSED & kwargs.keys()):
        if kwargs.pop(name) is not None:
            where = f"chat_template_kwargs.{name}"
            raise RequestError(
                f"{where} is not accepted: it is a parameter of the tokenizer, not a variable of the model's template.",
                param=where,
            )


def _integer(body: Mapping[str, Any], name: str, low: int, high: int | None, *, within: str = "") -> None:
    value, where = body.get(name), within + name
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{where} must be an integer, got {json.dumps(value)[:80]}.", param=where)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{where} must be {bounds}, got {value}.", param=where)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    # vLLM would coerce "true"; the proxy has to know for certain whether the answer is a stream.
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false.", param=name)
    return bool(value)


def _needs_fused(endpoint: Endpoint, body: Mapping[str, Any]) -> str | None:
    """P is asked for one token and D for many: where that decides how a prompt is cut, both must be one instance."""
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("truncate_prompt_tokens") == -1:
        return "truncate_prompt_tokens"
    if endpoint is Endpoint.RESPONSES:
        return "truncation" if body.get("truncation") not in (None, "disabled") else None
    for name in ("echo", "use_beam_search"):
        if body.get(name):
            return name
    return None
