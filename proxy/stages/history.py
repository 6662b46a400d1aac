"""What a client has of a streamed answer, and the rest of it from a stage that gives the answer once more. No I/O.

`TokenHistory` keeps tokens and text, after which another stage can go on. `Continuation` takes them out of what that
stage says. Bounded per stream and per process; an answer that is not kept ends with its stage.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from time import monotonic
from typing import Any

from epd_serve.errors import StageError
from proxy import strict_json
from proxy.config.limits import MigrationLimits
from proxy.stages.sse import BLANK_LINE, ROLE, Chunk, Event

STREAM_BYTES = 1 << 10
"""What each stream counts for, whatever it says."""

Channel = str | tuple[int, str]
"""Where text stands: a name in a chat's delta or `text` of a completion; of a tool call its index, and `name` or
`arguments`."""

TEXT = "text"
TOOL_CALLS = "tool_calls"
_CREATED = re.compile(rb'"created"\s*:\s*\d+')
_UNREADABLE = (AttributeError, LookupError, OverflowError, TypeError, ValueError)


class HistoryRoom:
    """The bytes that the streams of one process keep, `held_bytes` in all."""

    def __init__(self, limits: MigrationLimits) -> None:
        self.limits = limits
        self.held_bytes = 0


class TokenHistory:
    """Of one request. Whoever makes it calls `close` in the end.

    Attributes:
        begun: the client has some of the answer. why_not: why nobody can go on after it, or "".
        tokens: ids. texts: by channel, in UTF-8. calls: indices of tool calls whose id the client has.
        finished: the answer's last token and its finish reason are among it. counted: so is the usage.
        created: what the first event said.
        flags: of the stages that can go on (`Instance.answer_flags`). prompt: hash of the prompt's ids, or None.
        answers: attempts of whose decoding stage the client has something. migrations: how often another stage went
            on, or was to. last_at: `time.monotonic` of the last event.
        lost_at: the same of the last event of a stage that is gone, until another one has gone on.
    """

    def __init__(self, room: HistoryRoom, *, why_not: str = "") -> None:
        self.begun = False
        self.why_not = why_not
        self.tokens: array[int] = array("Q")
        self.texts: defaultdict[Channel, bytearray] = defaultdict(bytearray)
        self.calls: set[int] = set()
        self.finished = self.counted = False
        self.created: int | None = None
        self.flags: tuple[str, ...] | None = None
        self.prompt: int | None = None
        self.answers = self.migrations = 0
        self.last_at = 0.0
        self.lost_at: float | None = None
        self._room = room
        self._held_bytes = 0

    @property
    def goes_on(self) -> bool:
        """Whether another stage can go on where the client has come to."""
        return not self.why_not

    def begin(self) -> None:
        """The client is about to get something."""
        if not self.begun:
            self.begun = True
            self._hold(STREAM_BYTES)

    def add(self, chunk: Chunk | None, at_any_rate: bool = False) -> None:
        """The client has been sent this, here with the ids of its tokens.

        Args:
            at_any_rate: even where nobody can go on after it, so that a stage that is at work does not repeat it.
        """
        if self.why_not and not at_any_rate:
            return
        self.last_at = monotonic()
        try:
            size_bytes = self._read(chunk)
        except _UNREADABLE:
            return self.give_up("its events say something that cannot be cut")
        if not at_any_rate:
            self._hold(size_bytes)

    def give_up(self, why: str) -> None:
        """Keep nothing more of it. The first reason counts."""
        self.why_not = self.why_not or why
        self.close()

    def close(self) -> None:
        """Give back what it holds. Any number of times."""
        self._room.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self.tokens, self.texts = array("Q"), defaultdict(bytearray)

    def _hold(self, size_bytes: int) -> None:
        room, limits = self._room, self._room.limits
        room.held_bytes += size_bytes
        self._held_bytes += size_bytes
        if self._held_bytes > STREAM_BYTES + limits.stream_bytes:
            self.give_up("it is longer than what is kept of one")
        elif room.held_bytes > limits.process_bytes:
            self.give_up("as many answers are kept as may be")

    def _read(self, chunk: Chunk | None) -> int:
        """Returns the bytes that it takes. Raises where it has something that no other stage's answer could be cut
        by."""
        if chunk is None or chunk.choices is None:
            raise TypeError
        if self.created is None:
            self.created = chunk.created
        if not chunk.choices:
            self.counted = self.counted or chunk.usage is not None
            return 0
        (choice,) = chunk.choices
        ids, size = choice.token_ids, 0
        if ids is not None:
            self.tokens.extend(ids)
            size = self.tokens.itemsize * len(ids)
        elif choice.says:
            raise TypeError  # of tokens that nobody names
        if choice.finish_reason is not None:
            self.finished = True
        for name, value in ({TEXT: choice.text} if choice.delta is None else choice.delta).items():
            if name == TOOL_CALLS:
                size += sum(map(self._add_call, value or ()))
            elif value and name != ROLE:
                said = value.encode()
                self.texts[name] += said
                size += len(said)
        return size

    def _add_call(self, call: dict[str, Any]) -> int:
        index, function = call["index"], call.get("function") or {}
        if call.get("id"):
            self.calls.add(index)
        size = 0
        for part in ("name", "arguments"):
            said = (function.get(part) or "").encode()
            self.texts[(index, part)] += said
            size += len(said)
        return size


class AnotherAnswerError(StageError):
    """A stage does not go on after what the client has."""


class Continuation:
    """The answer of a stage after `history`, made when it begins.

    The stage may hold text back for a stop string, or give several tokens at once, so each channel is cut by itself.
    Ids of tool calls and the time of creation are this stage's own: the client goes on reading the first one's.
    """

    def __init__(self, history: TokenHistory, *, stage: str) -> None:
        self._texts = {channel: said.decode() for channel, said in history.texts.items()}
        self._tokens = history.tokens.tolist()
        self._calls = set(history.calls)
        self._finish = history.finished
        self._created = b'"created":%d' % history.created if history.created is not None else b""
        self._opening = True  # which the client has, whatever else
        self._stage = stage
        self._done = self._is_done()

    def rest(self, events: list[Event]) -> list[Event]:
        """What of these is news.

        Raises:
            StageError: the stage says something else than the one before did.
        """
        if self._done and not self._opening:
            return events
        return [news for event in events if (news := self._rest(event)) is not None]

    def dated(self, news: bytes) -> bytes:
        """It with the first stage's time of creation."""
        return _CREATED.sub(self._created, news) if self._created else news

    def _rest(self, event: Event) -> Event | None:
        if self._opening and event.opening:
            return None
        self._opening = False
        if not self._done:
            if event.comment:
                return None
            if event.done:
                raise self._another()
            answer, choice = read(event, self._stage)
            try:
                news = self._cut_choice(choice)
            except _UNREADABLE as error:
                raise self._another() from error
            ends, known = bool(choice.get("finish_reason")), self._finish
            self._finish = known and not ends
            self._done = self._is_done()
            if ends and not (known or self._done):
                raise self._another()
            if not (news or ends) or (known and ends):
                return None
            event = Event(written(answer))
        return event

    def _is_done(self) -> bool:
        return not (any(self._texts.values()) or self._calls or self._finish or self._tokens)

    def _cut_choice(self, choice: dict[str, Any]) -> bool:
        """Whether there is news in it. What the client has is taken out."""
        news = self._cut_tokens(choice)
        delta = choice.get("delta")
        if delta is None:
            return self._cut(choice, TEXT, TEXT) or news
        for name, value in delta.items():
            if name == TOOL_CALLS:
                for call in value or ():
                    index, function = call["index"], call.get("function") or {}
                    if index in self._calls and call.get("id"):
                        self._calls.remove(index)
                        del call["id"]
                        call.pop("type", None)
                    said = [self._cut(function, part, (index, part)) for part in ("name", "arguments")]
                    news = news or any(said) or bool(call.get("id"))
            elif name != ROLE:
                news = self._cut(delta, name, name) or news
        return news

    def _cut(self, holder: dict[str, Any], name: str, channel: Channel) -> bool:
        """Whether there is something left of `holder[name]`."""
        left, text = self._texts.get(channel, ""), holder.get(name) or ""
        if left and text:
            if not (left.startswith(text) or text.startswith(left)):
                raise self._another()
            holder[name], self._texts[channel] = text[len(left) :], left[len(text) :]
        return bool(holder.get(name))

    def _cut_tokens(self, choice: dict[str, Any]) -> bool:
        """Whether there are some left in its lists of tokens. Where there are no lists, only the text tells what the
        client has."""
        logprobs = choice.get("logprobs") or {}
        lists = [(logprobs, name) for name, value in logprobs.items() if isinstance(value, list)]
        if (ids := choice.get("token_ids")) is not None:
            lists.append((choice, "token_ids"))
        many = max([len(holder[name]) for holder, name in lists], default=len(self._tokens))
        known, self._tokens = self._tokens[:many], self._tokens[many:]
        if ids is not None and ids[: len(known)] != known:
            raise self._another()
        for holder, name in lists:
            holder[name] = holder[name][len(known) :]
        if "prompt_token_ids" in choice:  # said with the first token
            choice["prompt_token_ids"] = None
        return bool(lists) and many > len(known)

    def _another(self) -> StageError:
        return AnotherAnswerError(f"stage {self._stage} went on after another answer than was given", stage=self._stage)


def read(event: Event, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the event's JSON, its one choice), to be changed. Raises StageError: it is no event of one answer."""
    if event.chunk is None or len(event.chunk.choices or ()) != 1:
        raise StageError(f"stage {stage} sent an event that is none of an answer", stage=stage)
    answer = strict_json.decode(event.data)
    return answer, answer["choices"][0]


def written(answer: dict[str, Any]) -> bytes:
    return b"data: " + strict_json.encode(answer) + BLANK_LINE
