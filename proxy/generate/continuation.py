"""An answer that a stage gives once more, without what its client has of it: text, tokens, finish. No I/O.

The stage may hold text back for a stop string, or give several tokens at once, so each is cut independently. Ids of
tool calls and the time of creation are another stage's own: the client goes on reading the first one's.
"""

from __future__ import annotations

import re
from typing import Any

from epd_serve.errors import StageError
from proxy import strict_json
from proxy.generate.token_history import ROLE, TEXT, TOOL_CALLS, Channel, TokenHistory
from proxy.stages.sse import BLANK_LINE, data_of, is_comment, is_done, is_opening, split

Answer = dict[str, Any]
_CREATED = re.compile(rb'"created"\s*:\s*\d+')


class AnotherAnswerError(StageError):
    """A stage does not go on after what the client has."""


class Continuation:
    """Made when the new stage's answer begins. `done`: all that the client has has passed; the rest is news."""

    def __init__(self, history: TokenHistory, *, stage: str) -> None:
        history.fold()
        self._texts = dict(history.texts)
        self._tokens = history.tokens[:]
        self._at = 0
        self._calls = set(history.calls)
        self._known_calls = frozenset(history.calls)
        self._finish = history.finished
        self._created = b'"created":%d' % history.created if history.created is not None else b""
        self._blind = False
        self._opening = True  # which the client has, whatever else
        self._stage = stage

    @property
    def done(self) -> bool:
        tokens = self._at < len(self._tokens) and not self._blind
        return not (self._texts or self._calls or self._finish or tokens)

    def rest(self, events: bytes) -> bytes:
        """What of these whole events is news.

        Raises:
            StageError: the stage says something else than the one before did.
        """
        if self.done and not self._opening:
            return self.dated(events)
        return b"".join(self._rest(event) for event in split(events))

    def dated(self, events: bytes) -> bytes:
        """News with the first stage's time of creation."""
        return _CREATED.sub(self._created, events) if self._created else events

    def _rest(self, event: bytes) -> bytes:
        if self._opening and is_opening(event):
            return b""
        self._opening = False
        if self.done:
            return self.dated(event)
        if is_done(event):
            raise self._another()
        if is_comment(event):
            return b""
        answer, choice = read(event, self._stage)
        self._cut_texts(choice)
        self._cut_tokens(choice)
        if choice.get("finish_reason"):
            if self._finish:
                self._finish = False
                return b""
            if not self.done:
                raise self._another()
        return self.dated(written(answer)) if _says_something(choice) else b""

    def _cut_texts(self, choice: Answer) -> None:
        if "delta" not in choice:
            self._cut(choice, TEXT, TEXT)
            return
        delta = choice["delta"]
        for name in [name for name, value in delta.items() if value and isinstance(value, str)]:
            if name == ROLE:
                del delta[ROLE]
            else:
                self._cut(delta, name, name)
        if delta.get(TOOL_CALLS):
            delta[TOOL_CALLS] = [call for call in delta[TOOL_CALLS] if self._cut_call(call)]
            if not delta[TOOL_CALLS]:
                del delta[TOOL_CALLS]

    def _cut_call(self, call: Answer) -> bool:
        """Whether anything of it is news."""
        index, function = call.get("index"), call.get("function") or {}
        if not isinstance(index, int):
            raise self._another()
        if index in self._known_calls and call.get("id"):
            self._calls.discard(index)
            for name in ("id", "type"):
                call.pop(name, None)
        for name in ("name", "arguments"):
            if function.get(name):
                self._cut(function, name, (index, name))
                if not function[name] and name == "name":
                    del function[name]
        return bool(call.get("id") or any(function.values()))

    def _cut(self, holder: Answer, name: str, channel: Channel) -> None:
        """Take what the client has out of `holder[name]`."""
        left, text = self._texts.get(channel, ""), holder.get(name) or ""
        if not left or not text:
            return
        known = len(left) if text.startswith(left) else len(text)
        if not left.startswith(text[:known]):
            raise self._another()
        if known == len(left):
            del self._texts[channel]
        else:
            self._texts[channel] = left[known:]
        holder[name] = text[known:]

    def _cut_tokens(self, choice: Answer) -> None:
        """Take tokens out of all lists of tokens."""
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
        lists = [(holder, name, value) for holder in (choice, logprobs) for name, value in holder.items()]
        lists = [one for one in lists if isinstance(one[2], list) and one[1] != "prompt_token_ids"]
        if not lists:
            self._blind = True
            return
        many = len(ids) if isinstance(ids, list) else max(len(value) for _, _, value in lists)
        known = min(many, len(self._tokens) - self._at)
        if isinstance(ids, list) and ids[:known] != self._tokens[self._at : self._at + known].tolist():
            raise self._another()
        self._at += known
        for holder, name, value in lists:
            holder[name] = value[known:]
        if "prompt_token_ids" in choice:  # said with the first token
            choice["prompt_token_ids"] = None

    def _another(self) -> StageError:
        return AnotherAnswerError(f"stage {self._stage} went on after another answer than was given", stage=self._stage)


def read(event: bytes, stage: str) -> tuple[Answer, Answer]:
    """(the event's JSON, its one choice). Raises StageError: it is no event of an answer."""
    try:
        answer = strict_json.decode(data_of(event))
        (choice,) = answer["choices"]
        choice.get("delta", choice).get("")
        return answer, choice
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StageError(f"stage {stage} sent an event that is none of an answer", stage=stage) from error


def written(answer: Answer) -> bytes:
    return b"data: " + strict_json.encode(answer) + BLANK_LINE


def _says_something(choice: Answer) -> bool:
    holder = choice.get("delta", choice)
    return bool(
        (holder.get(TEXT) if holder is choice else any(holder.values()))
        or choice.get("finish_reason")
        or choice.get("token_ids")
        or any((choice.get("logprobs") or {}).values())
    )
