"""Answers of two stages: which may begin with P's first token, which can go on at another stage, in which way, and how
many at once. Pure, but for the wait.

A client must not be able to tell that its answer has two authors. So P's first token is shown only of

    one answer to one prompt, chat or completion       a merged stream has one first event to cut
    no parser (`parses_chat`), no tools                at the end of an answer parsers say what they have held back
    vLLM flags alike (`Instance.answer_flags`)         else P might sample, or say, something else than D

and, once it is there, only what `proxy.generate.relay.first_token` lets pass. All else is shown D's.

A stream whose stage is gone goes on in one of two ways.

FAST: what the client has becomes part of the prompt, which one prefill computes. That is the same answer where nothing
hangs on which tokens are prompt and which were sampled. REPLAY: the stage samples the given tokens again, one by one,
with no other choice, so that seeds draw, grammars advance, penalties count and parsers see each of them.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from epd_serve.answer_flags import parses_chat
from proxy.config.limits import MigrationLimits
from proxy.generate.router import Route
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.stages.history import TokenHistory

_COUNTS_USAGE = "--enable-force-include-usage"
_PENALTIES = ("presence_penalty", "frequency_penalty")
_REPLAYED = (
    "seed", "logprobs", "logprob_token_ids", "response_format", "structured_outputs", "bad_words", "tools",
    "thinking_token_budget", "watermarking", "repetition_detection", "vllm_xargs",
)  # fmt: skip
"""Fields that look at the tokens of the answer apart from those of the prompt, or may. A seed of 0 is one."""
_DECODE_ALONE = ("tools", "thinking_token_budget", "watermarking")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Way(StrEnum):
    """`NONE`: there is nothing left to be said but the end."""

    FAST = "fast"
    REPLAY = "replay"
    NONE = "none"


def alike(route: Route) -> bool:
    """Whether D of this route can go on after what P, or a former P, has sampled."""
    if route.prefill is None:
        return False
    flags = route.prefill.instance.answer_flags
    return flags is not None and flags == route.decode.instance.answer_flags


def is_one_token(request: ParsedRequest) -> bool:
    """Whether the client wants no more than one token, so that P can answer alone. Where two of the fields that its
    endpoint has say how many, vLLM heeds the first."""
    limits = (request.body.get(name) for name in _LIMITS)
    return next((limit for limit in limits if limit is not None), None) == 1


def may_be_shown(request: ParsedRequest, route: Route) -> bool:
    """Whether P's first token can be the client's, as far as that is known beforehand."""
    if not (request.stream and alike(route)) or _why_not_one(request):
        return False
    if any(request.body.get(name) for name in _DECODE_ALONE):
        return False
    return request.endpoint is not Endpoint.CHAT or not parses_chat(route.decode.instance.answer_flags or ())


def why_not(request: ParsedRequest) -> str:
    """Why no other stage could go on with the answer to this, or ""."""
    if why := _why_not_one(request):
        return f"{why} do not go on"
    body = request.body
    for name in ("echo", "use_beam_search"):
        if body.get(name):
            return f"answers with {name} do not go on"
    return "hidden reasoning does not go on" if body.get("include_reasoning") is False else ""


def way_on(request: ParsedRequest, history: TokenHistory, go_on: str = "auto") -> Way:
    """How another stage is to go on after `history`. `go_on`: the setting."""
    body = request.body
    if history.finished:
        return Way.REPLAY if _counts_usage(request, history) and not history.counted else Way.NONE
    parsed = request.endpoint is Endpoint.CHAT and parses_chat(history.flags or ())
    short = len(history.tokens) < (body.get("min_tokens") or 0)
    wanted = any(body.get(name) for name in _PENALTIES) or any(_is_wanted(body.get(name)) for name in _REPLAYED)
    return Way.REPLAY if go_on == "replay" or parsed or short or wanted else Way.FAST


def _is_wanted(value: object) -> bool:
    return value is not None and value is not False and value != [] and value != {}


def _counts_usage(request: ParsedRequest, history: TokenHistory) -> bool:
    options = request.body.get("stream_options") or {}
    asked = isinstance(options, dict) and bool(options.get("include_usage"))
    return asked or any(flag.startswith(_COUNTS_USAGE) for flag in history.flags or ())


def _why_not_one(request: ParsedRequest) -> str:
    """What the request wants in place of one answer to one prompt, or ""."""
    prompt = request.body.get("prompt")
    if request.endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return f"answers of {request.endpoint.value}"
    if (request.body.get("n") or 1) > 1:
        return "n answers"
    if request.endpoint is Endpoint.CHAT or isinstance(prompt, str):
        return ""
    one = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    return "" if one else "answers to several prompts"


class MigrationPace:
    """Lets streams go on, so many a second and in order: a node's death is no storm of prefills."""

    def __init__(self, limits: MigrationLimits) -> None:
        self._every_s = 1 / limits.per_s
        self._saved_s = (limits.burst - 1) / limits.per_s
        self._due = float("-inf")

    async def turn(self) -> None:
        """Wait for the next one."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due + self._every_s, now - self._saved_s)
        if self._due > now:
            await asyncio.sleep(self._due - now)
