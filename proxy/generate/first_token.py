"""P's first token as the client's first token, and D's stream without it. What may be shown, and how it is cut; no I/O.

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
from epd_serve.errors import StageError
from epd_serve.wire import KV_NOT_SENT, TOKEN_SENT
from proxy import strict_json
from proxy.errors import KvNotDelivered
from proxy.generate.router import Route
from proxy.request.client_sink import ShownToken
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.stages.sse import BLANK_LINE, is_comment, is_done, is_opening, split

_OLD_WAY = ("tools", "thinking_token_budget", "watermarking")
_LIMITS = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
}
_TEXT = "text"
_CONTENT = "content"


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
        shown: what the client will have seen with `public`, or None where it has to wait for D.
        public: the event as it would be were it not the last one.

    Raises:
        KvNotDelivered: D will not get what it needs to go on. StageError: no event of an answer.
    """

    def __init__(self, event: bytes, body: Mapping[str, Any], *, stage: str) -> None:
        self.shown: ShownToken | None = None
        self.public = b""
        answer, choice = _read(event, stage)
        reason, said = choice.get("finish_reason"), choice.get("stop_reason")
        self.whole = reason == "stop"
        if reason != "length" or not isinstance(said, str):
            return
        if said.startswith(KV_NOT_SENT):
            raise KvNotDelivered(said.removeprefix(KV_NOT_SENT), stage=stage)
        text = _text_of(choice)
        if not said.startswith(TOKEN_SENT) or not text or _may_begin(text, _stop_strings(body)):
            return
        self.shown = ShownToken(int(said.removeprefix(TOKEN_SENT)), text)
        choice["finish_reason"] = None
        if "delta" in choice:
            del choice["stop_reason"]
        else:
            choice["stop_reason"] = None
        answer.pop("system_fingerprint", None)  # stands in last events
        self.public = _written(answer)


class Continuation:
    """D's stream without what the client has of it. `done`: all of that has passed, the rest is the client's as it is.

    D may hold text back for a stop string, or give several tokens at once: text and tokens are cut independently.
    """

    def __init__(self, shown: ShownToken, *, stage: str) -> None:
        self._left = shown.text
        self._token_left = True
        self._stage = stage

    @property
    def done(self) -> bool:
        return not (self._left or self._token_left)

    def rest(self, events: bytes) -> bytes:
        """What of these whole events is news.

        Raises:
            StageError: D says something else than P did.
        """
        return b"".join(self._rest(event) for event in split(events))

    def _rest(self, event: bytes) -> bytes:
        if self.done:
            return event
        if is_done(event):
            raise self._another()
        if is_comment(event) or is_opening(event):
            return b""
        answer, choice = _read(event, self._stage)
        self._cut_text(choice)
        if self._token_left:
            _cut_token(choice)
            self._token_left = False
        return _written(answer) if _says_something(choice) else b""

    def _cut_text(self, choice: dict[str, Any]) -> None:
        holder, name = _holder(choice)
        text = holder.get(name) or ""
        known = len(self._left) if text.startswith(self._left) else len(text)
        if not self._left.startswith(text[:known]):
            raise self._another()
        self._left = self._left[known:]
        if text:
            holder[name] = text[known:]

    def _another(self) -> StageError:
        return StageError(f"stage {self._stage} went on after another first token", stage=self._stage)


def _read(event: bytes, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the event's JSON, its one choice)."""
    try:
        answer = strict_json.decode(event.partition(b":")[2])
        (choice,) = answer["choices"]
        _holder(choice)[0].get("")
        return answer, choice
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StageError(f"stage {stage} sent an event that is none of an answer", stage=stage) from error


def _written(answer: dict[str, Any]) -> bytes:
    return b"data: " + strict_json.encode(answer) + BLANK_LINE


def _holder(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Where the text of a choice stands: in a chat's delta, or in a completion's choice itself."""
    return (choice["delta"], _CONTENT) if "delta" in choice else (choice, _TEXT)


def _text_of(choice: dict[str, Any]) -> str:
    """The text of a first event, "" where it says something else, too, as what a parser has found."""
    holder, name = _holder(choice)
    if holder is not choice and any(value for key, value in holder.items() if key not in (name, "role")):
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


def _cut_token(choice: dict[str, Any]) -> None:
    """Take the first token out of the lists of tokens."""
    logprobs = choice.get("logprobs")
    for holder in (choice, logprobs or {}):
        for name, value in holder.items():
            if isinstance(value, list) and name != "prompt_token_ids":
                holder[name] = value[1:]
    if "prompt_token_ids" in choice:  # said with the token
        choice["prompt_token_ids"] = None


def _says_something(choice: dict[str, Any]) -> bool:
    holder, name = _holder(choice)
    return bool(
        holder.get(name)
        or choice.get("finish_reason")
        or choice.get("token_ids")
        or any((choice.get("logprobs") or {}).values())
    )
