"""P's first token as the client's first token. What may be shown, before D's stream goes on after it; no I/O.

P answers the client's own request for a stream, but ends at its first token; D, which is made to sample the same one
(`epd_serve.engine.first_token`), goes on after it. Its client must not be able to tell, so it is shown only where D's
stream is sure to begin with that very text:

    one answer to one prompt, chat or completion       a merged stream has one first event to cut
    no parser (`parses_chat`), no tools                at the end of an answer parsers say what they have held back
    no text that may be the beginning of a stop string vLLM holds that back until it knows, but not at the end
    a text at all                                      part of a character, or a token that is not shown, waits for D
    vLLM flags alike (`Instance.answer_flags`)         else P might sample, or say, something else than D

All else is shown D's. A token with which P's answer *stops* is the whole answer, and D is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from epd_serve.answer_flags import parses_chat
from epd_serve.wire import KV_NOT_SENT, TOKEN_SENT
from proxy.errors import KvNotDelivered
from proxy.generate.continuation import read, written
from proxy.generate.router import Route
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.stages.token_history import ROLE, TEXT

_OLD_WAY = ("tools", "thinking_token_budget", "watermarking")
_LIMITS = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
}


def alike(route: Route) -> bool:
    """Whether D of this route can go on after what P, or a former P, has sampled."""
    if route.prefill is None:
        return False
    flags = route.prefill.instance.answer_flags
    return flags is not None and flags == route.decode.instance.answer_flags


def is_one_token(request: ParsedRequest) -> bool:
    """Whether the client wants no more than one token, so that P can answer alone. Where two fields say how many, vLLM
    heeds the first that is there."""
    limits = (request.body.get(name) for name in _LIMITS.get(request.endpoint, ()))
    return next((limit for limit in limits if limit is not None), None) == 1


def may_be_shown(request: ParsedRequest, route: Route) -> bool:
    """Whether P's first token can be the client's, as far as that is known beforehand."""
    body = request.body
    if not (request.stream and alike(route)) or request.endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return False
    if (body.get("n") or 1) > 1 or any(body.get(name) for name in _OLD_WAY):
        return False
    if request.endpoint is Endpoint.CHAT:
        return not parses_chat(route.decode.instance.answer_flags or ())
    prompt = body.get("prompt")
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt))


class FirstEvent:
    """P's first event of an answer, read.

    Attributes:
        whole: P's answer ends here for the client, too.
        public: the event as it would be were it not the last one, with the token's id; empty where D is waited for.

    Raises:
        KvNotDelivered: D will not get what it needs to go on. StageError: no event of an answer.
    """

    def __init__(self, event: bytes, body: Mapping[str, Any], *, stage: str) -> None:
        self.public = b""
        answer, choice = read(event, stage)
        reason, said = choice.get("finish_reason"), choice.get("stop_reason")
        self.whole = reason == "stop"
        if reason != "length" or not isinstance(said, str):
            return
        if said.startswith(KV_NOT_SENT):
            raise KvNotDelivered(said.removeprefix(KV_NOT_SENT), stage=stage)
        text = _text_of(choice)
        if not said.startswith(TOKEN_SENT) or not text or _may_begin(text, _stop_strings(body)):
            return
        choice["finish_reason"] = None
        if "delta" in choice:
            del choice["stop_reason"]
        else:
            choice["stop_reason"] = None
        answer.pop("system_fingerprint", None)  # stands in last events
        choice["token_ids"] = [int(said.removeprefix(TOKEN_SENT))]
        self.public = written(answer)


def _text_of(choice: dict[str, Any]) -> str:
    """The text of a first event, "" where it says something else, too, as what a parser has found."""
    holder, name = (choice["delta"], "content") if "delta" in choice else (choice, TEXT)
    if holder is not choice and any(value for key, value in holder.items() if key not in (name, ROLE)):
        return ""
    text = holder.get(name)
    return text if isinstance(text, str) else ""


def _stop_strings(body: Mapping[str, Any]) -> Collection[str]:
    """Those that vLLM keeps out of the text."""
    stop = body.get("stop") or ()
    if body.get("include_stop_str_in_output"):
        return ()
    return (stop,) if isinstance(stop, str) else stop


def _may_begin(text: str, stops: Collection[str]) -> bool:
    """Whether a stop string may have begun with the end of `text`."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))
