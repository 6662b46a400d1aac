"""What a client has of a streamed answer: the tokens and the text that another stage goes on after. No I/O.

Events are kept as the stage wrote them, and read only when they are many or somebody has to go on: the relay pays an
append per read. Bounded per stream and per door; an answer that is not kept ends with its stage.
"""

from __future__ import annotations

import sys
from array import array
from time import monotonic
from typing import Any

import msgspec

from proxy.config.limits import MigrationLimits
from proxy.stages.sse import data_of, is_comment, split

FOLD_BYTES = 32 << 10
"""Of events, before they are read: some 120 tokens, 0.2 ms. Each stream counts as so many bytes from its beginning."""

Channel = str | tuple[int, str]
"""Where text stands: a name in a chat's delta or `text` of a completion; of a tool call its index, and `name` or
`arguments`."""

TEXT = "text"
TOOL_CALLS = "tool_calls"
ROLE = "role"


class HistoryRoom:
    """The bytes that the streams of one door keep, `held_bytes` in all."""

    def __init__(self, limits: MigrationLimits) -> None:
        self.limits = limits
        self.held_bytes = 0


class TokenHistory:
    """Of one request. Whoever makes it calls `close` in the end.

    Attributes:
        begun: the client has some of the answer. why_not: why nobody can go on after it, or "".
        tokens: ids. texts: by channel. calls: indices of tool calls whose id the client has. All as of `fold`.
        finished: the answer's last token and its finish reason are among it. counted: so is the usage.
        created: what the first event said.
        flags: of the stages that can go on (`Instance.answer_flags`). prompt: digest of the prompt's ids, or None.
        answers: attempts of whose decoding stage the client has something. migrations: how often another stage went
            on, or was to. last_at: `time.monotonic` of the last event.
        lost_at: the same of the last event of a stage that is gone, until another one has gone on.
    """

    def __init__(self, room: HistoryRoom, *, why_not: str = "") -> None:
        self.begun = False
        self.why_not = why_not
        self.tokens: array[int] = array("Q")
        self.texts: dict[Channel, str] = {}
        self.calls: set[int] = set()
        self.finished = self.counted = False
        self.created: int | None = None
        self.flags: tuple[str, ...] | None = None
        self.prompt: int | None = None
        self.answers = self.migrations = 0
        self.last_at = 0.0
        self.lost_at: float | None = None
        self._room = room
        self._raw: list[bytes] = []
        self._raw_bytes = self._held_bytes = 0

    @property
    def goes_on(self) -> bool:
        """Whether another stage can go on where the client has come to."""
        return not self.why_not

    def add(self, events: bytes) -> None:
        """The client has been sent these whole events, here with the ids of their tokens."""
        if self.why_not:
            return
        self._raw.append(events)
        self._raw_bytes += len(events)
        self.last_at = monotonic()
        if self._raw_bytes > FOLD_BYTES:
            self.fold()

    def begin(self) -> None:
        """The client is about to get something."""
        if not self.begun:
            self.begun = True
            self._hold(FOLD_BYTES)

    def fold(self) -> None:
        """Read what was kept."""
        raw, self._raw, self._raw_bytes = self._raw, [], 0
        if not raw or self.why_not:
            return
        pieces: dict[Channel, list[str]] = {}
        try:
            events = (data_of(one) for several in raw for one in split(several) if not is_comment(one))
            for event in _DECODER.decode(b"[%b]" % b",".join(events)):
                self._read(event, pieces)
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, _Unreadable):
            return self.give_up("its events say something that cannot be cut")
        for channel, said in pieces.items():
            self.texts[channel] = self.texts.get(channel, "") + "".join(said)
        size = self.tokens.itemsize * len(self.tokens) + sum(map(sys.getsizeof, self.texts.values()))
        if size > self._room.limits.stream_bytes:
            return self.give_up("it is longer than what is kept of one")
        self._hold(FOLD_BYTES + size)

    def _hold(self, size_bytes: int) -> None:
        self._room.held_bytes += size_bytes - self._held_bytes
        self._held_bytes = size_bytes
        if self._room.held_bytes > self._room.limits.process_bytes:
            self.give_up("as many answers are kept as may be")

    def give_up(self, why: str) -> None:
        """Keep nothing more of it. The first reason counts."""
        self.why_not = self.why_not or why
        self.close()

    def close(self) -> None:
        """Give back what it holds. Any number of times."""
        self._room.held_bytes -= self._held_bytes
        self._raw, self._raw_bytes, self._held_bytes = [], 0, 0
        self.tokens, self.texts = array("Q"), {}

    def _read(self, event: _Event, pieces: dict[Channel, list[str]]) -> None:
        if self.created is None:
            self.created = event.created
        if not event.choices:
            self.counted = self.counted or event.usage is not None
            return
        if len(event.choices) > 1:
            raise _Unreadable
        choice = event.choices[0]
        if choice.text:
            pieces.setdefault(TEXT, []).append(choice.text)
        for name, value in (choice.delta or {}).items():
            if not value or name == ROLE:
                continue
            if name == TOOL_CALLS:
                self._read_calls(value, pieces)
            elif isinstance(value, str):
                pieces.setdefault(name, []).append(value)
            else:
                raise _Unreadable
        if choice.token_ids is not None:
            self.tokens.extend(choice.token_ids)
        elif _says(choice):
            raise _Unreadable  # of tokens that nobody names
        self.finished = self.finished or choice.finish_reason is not None

    def _read_calls(self, calls: Any, pieces: dict[Channel, list[str]]) -> None:
        for call in msgspec.convert(calls, list[_Call]):
            if call.id:
                self.calls.add(call.index)
            for name, text in (("name", call.function.name), ("arguments", call.function.arguments)):
                if text:
                    pieces.setdefault((call.index, name), []).append(text)


class _Unreadable(Exception):
    """An event with something that no other stage's answer could be cut by."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    created: int | None = None
    usage: Any = None


_DECODER = msgspec.json.Decoder(list[_Event])


def _says(choice: _Choice) -> bool:
    """Whether it is more than an opening, or an end without a token."""
    return bool(choice.text or any(value for name, value in (choice.delta or {}).items() if name != ROLE))
