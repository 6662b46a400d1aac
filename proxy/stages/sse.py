"""Server-sent events: cut a byte stream into complete events, recognise openings, errors, the end.

What goes to the client is what the stage sent, byte for byte. What an event is, is read from its lines and its JSON, so
that nothing depends on how a stage spaces it; which events are worth reading is told by words that they must have in
them. No I/O.
"""

from __future__ import annotations

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
NOT_JSON = object()
BLANKS = b" \t\r\n"


class WholeEvents:
    """Feeds on chunks cut anywhere, gives what is whole. `done`: the last of it was [DONE]."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """The events completed by `chunk`, in order and with their blank lines; may be none."""
        if self._rest:
            chunk = self._rest + chunk
        if chunk.endswith(BLANK_LINE):  # as vLLM writes, and networks mostly cut
            self._rest = b""
            self.done = chunk.endswith(DONE + BLANK_LINE) and is_done(last_of(chunk))
            return chunk
        whole = chunk.rfind(BLANK_LINE) + len(BLANK_LINE) if BLANK_LINE in chunk else 0
        self._rest = chunk[whole:]
        return chunk[:whole]


def split(events: bytes) -> list[bytes]:
    """Whole events one by one."""
    return [event + BLANK_LINE for event in events.split(BLANK_LINE)[:-1]]


def last_of(events: bytes) -> bytes:
    """The last of several whole events."""
    return events.removesuffix(BLANK_LINE).rpartition(BLANK_LINE)[2] + BLANK_LINE


class Choice(Struct, gc=False):
    """What is asked of one. `delta`, `logprobs`: as they are written; empty where they are not there."""

    finish_reason: str | None = None
    delta: Raw = Raw()
    logprobs: Raw = Raw()

    @property
    def says_nothing(self) -> bool:
        """Whether vLLM writes it for ids of tokens alone, where a parser holds the text back."""
        empty = self.finish_reason is None and bytes(self.logprobs) in (b"", b"null")
        return empty and bytes(self.delta).translate(None, BLANKS) == b"{}"


class Event(Struct, gc=False):
    """An event of an answer."""

    choices: list[Choice] = []


_EVENT = msgspec.json.Decoder(Event)


def read(event: bytes) -> Event | None:
    """One event, read; None where it is no JSON of an answer, as a comment or the end."""
    try:
        return _EVENT.decode(data_of(event))
    except msgspec.MsgspecError:
        return None


def may_fail(events: bytes) -> bool:
    """Whether one of these may be an error, an abort, or have a name, judged without cutting them: an event that is one
    has such a word in it, however it is spaced. They may be none all the same: their text may have these words."""
    return b'"error"' in events or b'"abort"' in events or b"event:" in events


def name_and_data(event: bytes) -> tuple[bytes, bytes]:
    """What an event is called, "" where it has no name, and what it says."""
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - len(BLANK_LINE):
        return b"", event[5:].strip()
    lines = [line.partition(b":") for line in event.splitlines()]
    names = [value.strip() for field, _, value in lines if field == b"event"]
    return names[-1] if names else b"", b"\n".join(value.strip() for field, _, value in lines if field == b"data")


def data_of(event: bytes) -> bytes:
    """What an event says."""
    return name_and_data(event)[1]


def is_done(event: bytes) -> bool:
    """Whether the stream ends with it."""
    name, data = name_and_data(event)
    return data == DONE or name in RESPONSE_ENDS


def is_comment(event: bytes) -> bool:
    """A keep-alive, which says nothing about the request."""
    return event.startswith(b":")


def is_opening(event: bytes) -> bool:
    """A chat stream's first event of a choice, a role and nothing else, or a response's first two. vLLM sends them
    before it looks at what the engine answered, so they do not say that there is an answer."""
    name, data = name_and_data(event)
    if name in RESPONSE_OPENINGS:
        return True
    if b'"role"' not in data:
        return False
    try:
        choices = strict_json.decode(data)["choices"]
        return bool(choices) and all(
            not choice.get("finish_reason") and not any(v for k, v in choice["delta"].items() if k != "role")
            for choice in choices
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def error_payload(event: bytes) -> bytes | None:
    """The JSON of an error event, or of an answer that was aborted, or None for any other event."""
    if not may_fail(event):  # most of them, for less than it takes to read one
        return None
    name, data = name_and_data(event)
    if name:
        return data if name == RESPONSE_ERROR else None
    answer = _decoded(data)
    if not isinstance(answer, dict):
        return data if answer is NOT_JSON and b'"error"' in data else None
    if answer.get("error"):
        return data
    choices = answer.get("choices")
    choices = choices if isinstance(choices, list) else []
    aborted = any(isinstance(choice, dict) and choice.get("finish_reason") == ABORT for choice in choices)
    return strict_json.encode({"error": {"message": ABORTED, "code": 500}}) if aborted else None


def _decoded(data: bytes) -> Any:
    try:
        return strict_json.decode(data)
    except (ValueError, RecursionError):
        return NOT_JSON
