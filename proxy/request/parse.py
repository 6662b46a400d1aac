"""Makes a `ParsedRequest` of a body of OpenAI's API or Anthropic's: what the proxy must know, and what it must not let
through.

Only fields that are known go on (`proxy/fields/rules.py`); those that could kill an engine or fetch another tenant's
feature are refused by name. Checked here are the fields that the proxy acts on; their values otherwise
are vLLM's to judge. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from epd_serve.errors import NotFoundError, RequestError
from proxy import strict_json
from proxy.config.settings import ProxySettings
from proxy.fields.messages import chat_of, tokenized_chat_of
from proxy.fields.parts import MediaRef, media_refs
from proxy.fields.rules import MEDIA_OPTIONS, MESSAGES_MODEL, TEMPLATE_KWARGS_REFUSED, Sieve, rules_of

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


_PROMPTS = {Endpoint.CHAT: "messages", Endpoint.RESPONSES: "input", Endpoint.DETOKENIZE: "tokens"}
"""The field that a request is about; of all others `prompt`."""

_Positive = Annotated[int, Meta(ge=1)]
_Few = Annotated[int, Meta(ge=0, le=64)]
_Some = Annotated[list[Any], Meta(min_length=1)]
_Number = int | float | bool


class _Repetition(Struct):
    """Bounds of `repetition_detection`, which vLLM's scheduler looks for in Python after every token, all others
    waiting (0.32, `v1/core/sched/utils.py`): at most some 30,000 comparisons."""

    max_pattern_size: _Few | None = None
    min_pattern_size: _Few | None = None
    min_count: Annotated[int, Meta(ge=0, le=16)] | None = None


class _Checked(Struct):
    """Fields that the proxy acts on, and those that vLLM 0.23 uses before it looks at their types. Null is as if left
    out."""

    messages: _Some | None = None
    prompt: str | _Some | None = None
    input: str | _Some | None = None
    tokens: list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]] | None = None
    stream: bool | None = None  # vLLM would coerce "true"
    n: _Positive | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    max_output_tokens: _Positive | None = None
    repetition_detection: _Repetition | None = None
    vllm_xargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_logprobs: _Number | None = None
    top_logprobs: _Number | None = None


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
    if not endpoint.generates and body.get("model") is None:
        body["model"] = settings.served_models[0]  # there is one tokenizer
    model = _model(body, settings)
    checked = _checked(body)
    if checked.vllm_xargs:
        sieve.xargs(body["vllm_xargs"], settings.xargs)
    if checked.chat_template_kwargs:
        _template_variables(body["chat_template_kwargs"])
    if endpoint is Endpoint.COMPLETIONS and isinstance(body.get("logprobs"), str | list | dict):
        raise RequestError("logprobs must be a number.", param="logprobs")
    if (checked.n or 1) > settings.max_n:
        raise RequestError(f"n must be at most {settings.max_n}, got {checked.n}.", param="n")
    if endpoint is Endpoint.RESPONSES and body.get("truncation") is None:
        body.pop("truncation", None)  # vLLM 0.32 takes null for it, and breaks off when it repeats it in a stream
    _one_choice_of_tokens(body)
    media = _media(endpoint, body)
    if called:
        media = tuple(replace(ref, param=name) for ref, name in zip(media, called, strict=True))
    _check_modalities(media, settings)
    stream = bool(checked.stream) and endpoint.generates
    needs_fused = _needs_fused(endpoint, body)
    request = ParsedRequest(endpoint, body, model, stream, media, needs_fused, tuple(sieve.dropped))
    if not settings.stages_encode and media and endpoint.generates:
        for name in request.processor_options:  # vLLM names an item anew by them, which metadata alone cannot carry
            raise RequestError(
                f"{name} is not taken with media here: prefill and decode stages have no encoder.", param=name
            )
    return request


def _checked(body: Mapping[str, Any]) -> _Checked:
    try:
        return convert(body, _Checked)
    except ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`")
        must_be = said.removeprefix("Expected ").replace(" | null", "")
        raise RequestError(f"{param} must be {must_be}.", param=param) from None


def _model_of(endpoint: Endpoint, body: Mapping[str, Any]) -> str:
    """Which of vLLM's requests a body is, as `proxy/fields/vllm_fields.py` calls it."""
    if endpoint is Endpoint.TOKENIZE:
        return "tokenize_chat" if "messages" in body else "tokenize_text"
    return _MODELS[endpoint]


def _media(endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[MediaRef, ...]:
    """The media of the prompt, which has to be there."""
    tokenizes_chat = endpoint is Endpoint.TOKENIZE and "messages" in body
    name = "messages" if tokenizes_chat else _PROMPTS.get(endpoint, "prompt")
    prompt = body.get(name)
    if prompt is None:
        raise RequestError(f"{name} is required.", param=name)
    if name == "messages":
        return media_refs(prompt)
    return media_refs(prompt, "input") if name == "input" and not isinstance(prompt, str) else ()


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


def _template_variables(kwargs: dict[str, Any]) -> None:
    for name in sorted(TEMPLATE_KWARGS_REFUSED & kwargs.keys()):
        if kwargs.pop(name) is not None:
            where = f"chat_template_kwargs.{name}"
            raise RequestError(
                f"{where} is not accepted: it is a parameter of the tokenizer, not a variable of the model's template.",
                param=where,
            )


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
