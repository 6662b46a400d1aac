"""The parameters of a request to a simulated stage beyond its prompts: checked once, with vLLM's defaults. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd_serve.kv.params import tokens_to_go_on_after
from epd_serve.sim.profile import Profile
from epd_serve.sim.prompts import CHAT, COMPLETIONS, RESPONSES, Prompt, prompts_of
from epd_serve.wire import REPLAY

LARGEST_N = 128


@dataclass(frozen=True)
class RequestParams:
    """One request.

    Attributes:
        id: `chatcmpl-…`, `cmpl-…` or `resp_…`; body: as it came. responses: it is one of `/v1/responses`.
        prompts: one per entry of `prompt`. n: answers to each.
        limit: tokens of an answer; bounded: because the client said so (`finish_reason` is `length` then).
        logprobs: how many alternatives per token, or None. tool: function that the answer has to call, or "".
        kv, xargs: words for the connectors of the stage.
        given: tokens that the client has of the answer; it goes on after them. replay: they are generated once more,
            else they are computed with the prompt.
    """

    id: str
    body: Mapping[str, Any]
    chat: bool
    responses: bool
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    limit: int
    bounded: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stops: tuple[str, ...]
    priority: int
    logprobs: int | None
    tool: str
    echo: bool
    token_ids: bool
    kv: Mapping[str, Any] | None
    xargs: Mapping[str, Any]
    given: list[int] = field(default_factory=list)
    replay: bool = False

    @property
    def prefilled(self) -> tuple[int, ...]:
        """Those of the given tokens that are computed with the prompt."""
        return () if self.replay else tuple(self.given)


def parse_params(path: str, body: Mapping[str, Any], request_id: str, model: str, profile: Profile) -> RequestParams:
    """Checks a body.

    Raises:
        ValueError: which field is wrong.
    """
    chat, responses = path == CHAT, path == RESPONSES
    prompts = tuple(prompts_of(path, body, profile.item_tokens))
    longest = max(prompt.tokens for prompt in prompts)
    model_len = min(profile.capacity.max_model_len, profile.capacity.kv_tokens)
    limits = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}
    wanted = _integer(body, limits.get(path, "max_tokens"), None, least=1)
    if chat and wanted is None:
        wanted = _integer(body, "max_tokens", None, least=1)
    if longest + (wanted or 1) > model_len:
        raise ValueError(
            f"This model's maximum context length is {model_len} tokens. However, you requested {wanted or 1} output "
            f"tokens and your prompt contains {longest} input tokens, for a total of {longest + (wanted or 1)} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens."
        )
    limit = wanted
    if limit is None:
        limit = model_len - longest if body.get("ignore_eos") else min(profile.output_tokens, model_len - longest)
    kv = _object(body, "kv_transfer_params")
    given, replay = tokens_to_go_on_after(dict(kv)), bool(kv.get(REPLAY))
    if given and (responses or len(prompts) > 1 or (body.get("n") or 1) > 1):
        raise ValueError("goes_on_after has to be of one answer to a chat or to one prompt")
    if given and not replay and "transfer_id" in kv and "peer" not in kv:  # a P: it is to sample one more
        limit += len(given)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ValueError("stream_options has to be an object")
    return RequestParams(
        id=_response_id(body, request_id) if responses else f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        body=body,
        chat=chat,
        responses=responses,
        model=model,
        prompts=prompts,
        n=1 if responses else _integer(body, "n", 1, least=1, most=LARGEST_N) or 1,
        limit=limit,
        bounded=wanted is not None or bool(body.get("ignore_eos")),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        stops=_stops(body.get("stop")),
        priority=_integer(body, "priority", 0) or 0,
        logprobs=None if responses else _logprobs(body, chat=chat),
        tool="" if responses else _tool(body),
        echo=bool(body.get("echo")) and path == COMPLETIONS,
        token_ids=bool(body.get("return_token_ids")),
        kv=kv or None,
        xargs=_object(body, "vllm_xargs"),
        given=given,
        replay=replay,
    )


def _response_id(body: Mapping[str, Any], request_id: str) -> str:
    """Its Responses heed no header: the id is a field of the body."""
    given = body.get("request_id")
    return given if isinstance(given, str) and given else f"resp_{request_id}"


def _integer(
    body: Mapping[str, Any], name: str, default: int | None, *, least: int | None = None, most: int | None = None
) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} has to be an integer")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; it has to lie between {least} and {most or 'any number'}")
    return value


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} has to be an object")
    return value


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise ValueError("stop has to be a text or a list of texts")
    return tuple(one for one in stops if one)


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    if not chat:
        return _integer(body, "logprobs", None, least=0, most=20)
    return _integer(body, "top_logprobs", 0, least=0, most=20) if body.get("logprobs") else None


def _tool(body: Mapping[str, Any]) -> str:
    """The function that the client insists on: named, or the first where any is required."""
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        return str(choice["function"].get("name", ""))
    if choice == "required" and isinstance(tools, list) and tools and isinstance(tools[0], dict):
        return str((tools[0].get("function") or {}).get("name", ""))
    return ""
