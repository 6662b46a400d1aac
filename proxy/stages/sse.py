"""Server-sent events of a stage: cut out of a byte stream, and read.

An event is read from its lines and its JSON, so that nothing depends on how a stage spaces it. What goes to the client
is what the stage sent, byte for byte, but for ids of tokens that the client did not ask for. No I/O.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from proxy import strict_json

BLANK_LINE = b"\n\n"
DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]" + BLANK_LINE
# Streams of /v1/responses name their events, and end with one of these.
RESPONSE_OPENINGS = (b"response.created", b"response.in_progress")
RESPONSE_ENDS = (b"response.completed", b"response.incomplete", b"response.failed")
RESPONSE_ERROR = b"error"
ABORT = "abort"
"""Finish reason of an answer that its engine gave up, as when it is ended: no end that a model has come to."""
ABORTED = "the answer was aborted"
ROLE = "role"
_NULL = (b"", b"null")
# Within a JSON string quotes are escaped, so a name between two quotes before a colon is a field's; a list of numbers
# ends at its first bracket.
_IDS = re.compile(rb'"token_ids"\s*:\s*\[[^\]]*\]')
_PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*\[[^\]]*\]')


class WholeEvents:
    """Feeds on chunks cut anywhere, gives what is whole. `done`: the last of it was [DONE]."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """The events completed by `chunk`, in order and with their blank lines; may be none."""
        whole, end, self._rest = (self._rest + chunk).rpartition(BLANK_LINE)
        self.done = not self._rest and whole.endswith(DONE) and Event(whole.rpartition(BLANK_LINE)[2] + end).done
        return whole + end


def split(events: bytes) -> list[bytes]:
    """Whole events one by one."""
    if events.find(BLANK_LINE) == len(events) - len(BLANK_LINE):  # as mostly
        return [events]
    return [event + BLANK_LINE for event in events.split(BLANK_LINE)[:-1]]


def is_plain(events: bytes) -> bool:
    """Whether none of these is an error, an abort or an end, or has a name, judged without reading them: an event that
    is one has such a word in it. What is not plain may be none of this all the same, if its text has these words."""
    return not (DONE in events or b'"error"' in events or b'"abort"' in events or b"event:" in events)


def without_ids(events: bytes) -> bytes:
    """Whole events as vLLM writes them for a client that does not ask for ids of tokens, but for those that it does not
    write then (`Event.only_ids`)."""
    public = _IDS.sub(b'"token_ids":null', events)
    return _PROMPT_IDS.sub(b'"prompt_token_ids":null', public) if b'"prompt_token_ids"' in public else public


class Choice(Struct, gc=False):
    """One of the answers that a chunk adds to. What is `Raw` is as it was written, empty where it is not there."""

    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Raw = Raw()
    prompt_token_ids: Raw = Raw()

    @property
    def says(self) -> bool:
        """Whether there is more to it than a role and ids of tokens."""
        told = self.text or any(value for name, value in (self.delta or {}).items() if name != ROLE)
        return bool(told or self.finish_reason)


class Chunk(Struct, gc=False):
    """The JSON of an event: one chunk of an answer, or an error."""

    choices: list[Choice] | None = None
    created: int | None = None
    usage: Any = None
    error: Any = None
    prompt_token_ids: Raw = Raw()

    @property
    def prompt(self) -> bytes:
        """The ids of the prompt, without blanks; empty where they are not there."""
        for said in (self, *(self.choices or ())):
            if (ids := bytes(said.prompt_token_ids)) not in _NULL:
                return ids.translate(None, b" \t\r\n")
        return b""


_DECODER = msgspec.json.Decoder(Chunk)


def _chunk(data: bytes) -> Chunk | None:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # what it is then, its lines say


class Event:
    """One whole event, read.

    Attributes:
        raw: as it came. name, data: what it is called, b"" for most, and what it says.
        chunk: its JSON; None where it is none of an answer, as of a comment, of [DONE] or of a named event.
        done: the stream ends with it. goes_on: it is one of many that add to an answer, neither an error nor the end of
            anything, and says more than ids of tokens.
    """

    __slots__ = ("chunk", "data", "done", "goes_on", "name", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.name = b""
        self.done = self.goes_on = False
        self.chunk = chunk = _chunk(data := raw[5:]) if raw.startswith(b"data:") else None
        if chunk is None:
            lines = [line.partition(b":") for line in raw.splitlines()]
            names = [value.strip() for field, _, value in lines if field == b"event"]
            data = b"\n".join(value.strip() for field, _, value in lines if field == b"data")
            self.name = names[-1] if names else b""
            self.done = data == DONE or self.name in RESPONSE_ENDS
            self.chunk = _chunk(data) if not (self.name or self.done) else None
        elif chunk.choices and not chunk.error:
            for choice in chunk.choices:
                if choice.finish_reason or choice.delta == {}:
                    break
            else:
                self.goes_on = True
        self.data = data

    @property
    def comment(self) -> bool:
        """Whether it is a keep-alive, which says nothing about the request."""
        return self.raw.startswith(b":")

    @property
    def opening(self) -> bool:
        """Whether it is a chat stream's first event of a choice, a role and nothing else, a response's first two, or
        has no choice. vLLM sends them before it looks at what the engine answered, so they do not say that there is an
        answer."""
        choices = self.chunk.choices if self.chunk is not None else None
        if choices is None:
            return self.name in RESPONSE_OPENINGS
        return all(ROLE in (choice.delta or {}) and not choice.says for choice in choices)

    @property
    def failure(self) -> bytes | None:
        """The JSON of an error, or of an answer that was aborted; None for any other event."""
        if self.name:
            return self.data if self.name == RESPONSE_ERROR else None
        if self.chunk is None:
            return self.data if b'"error"' in self.data else None
        if self.chunk.error:
            return self.data.strip()
        for choice in self.chunk.choices or ():
            if choice.finish_reason == ABORT:
                return strict_json.encode({"error": {"message": ABORTED, "code": 500}})
        return None

    @property
    def only_ids(self) -> bool:
        """Whether vLLM writes it for ids of tokens alone, as where a parser holds the text back."""
        choices = self.chunk.choices if self.chunk is not None else None
        return bool(choices) and all(
            one.delta == {} and not one.finish_reason and bytes(one.logprobs) in _NULL for one in choices or ()
        )
