"""Server-sent events as vLLM writes them: cut a byte stream into complete events, recognise openings, errors, the end.

What goes to the client is what the stage sent, byte for byte. Only where a stage spaces its JSON otherwise than vLLM
does are its events written anew (`compact`), so that all others may look for bytes in them. No I/O.
"""

from __future__ import annotations

import re

from proxy import strict_json

DONE = b"data: [DONE]"
ERROR_PREFIXES = (b'data: {"error"', b'data:{"error"')
# Streams of /v1/responses name their events, and end with one of these. A line break cannot stand inside their JSON.
RESPONSE_OPENINGS = (b"event: response.created\n", b"event: response.in_progress\n")
RESPONSE_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")
RESPONSE_ERROR = b"event: error\n"


BLANK_LINE = b"\n\n"
_DATA = re.compile(rb"^data:", re.MULTILINE)
DONE_EVENT = DONE + BLANK_LINE
NAMED = b"event: "
ERROR_MARK = b'{"error"'
ABORT_MARK = b'"finish_reason":"abort"'
"""Of an answer that its engine gave up, as when it is ended: no end that a model has come to."""
ABORTED = "the answer was aborted"


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
            self.done = chunk.endswith(DONE_EVENT) and is_last(chunk)
            return chunk
        whole = chunk.rfind(BLANK_LINE) + len(BLANK_LINE) if BLANK_LINE in chunk else 0
        self._rest = chunk[whole:]
        return chunk[:whole]


def split(events: bytes) -> list[bytes]:
    """Whole events one by one."""
    return [event + BLANK_LINE for event in events.split(BLANK_LINE)[:-1]]


def compact(events: bytes) -> bytes:
    """Whole events, in the form in which vLLM writes them where they have something that is looked for by bytes. Within
    a JSON string the quotes of all that would be escaped."""
    if (
        events.count(b'token_ids"') == events.count(b'token_ids":[') + events.count(b'token_ids":null')
        and (b'"abort"' not in events or ABORT_MARK in events)
        and (b'"error"' not in events or ERROR_MARK in events)
        and events.startswith((b"data: ", b":", NAMED))
    ):
        return events
    return b"".join(map(_compact, split(events)))


def _compact(event: bytes) -> bytes:
    data = _DATA.search(event)
    if data is None:
        return event
    name, payload = event[: data.start()], event[data.end() :]
    if b"\n" in payload.rstrip(b"\n"):
        return event
    if payload.strip() == b"[DONE]":
        return name + DONE_EVENT
    try:
        return b"%bdata: %b%b" % (name, strict_json.encode(strict_json.decode(payload)), BLANK_LINE)
    except (ValueError, RecursionError):
        return event


def is_plain(events: bytes) -> bool:
    """Whether no event among these can be an error, judged without cutting them: the mark of one cannot stand inside a
    JSON string, where its quotes would be escaped. Named events are not plain: a name may be that of the end."""
    return ERROR_MARK not in events and ABORT_MARK not in events and not events.startswith(NAMED)


def is_last(events: bytes) -> bool:
    """Whether the last of these is the stream's end. Inside a JSON string there is no blank line to precede it."""
    return events.endswith(DONE_EVENT) and (len(events) == len(DONE_EVENT) or events.endswith(BLANK_LINE + DONE_EVENT))


def is_done(event: bytes) -> bool:
    return event.startswith((DONE, *RESPONSE_ENDS))


def is_comment(event: bytes) -> bool:
    """A keep-alive, which says nothing about the request."""
    return event.startswith(b":")


def is_opening(event: bytes) -> bool:
    """A chat stream's first event of a choice, a role and nothing else, or a response's first two. vLLM sends them
    before it looks at what the engine answered, so they do not say that there is an answer."""
    if event.startswith(RESPONSE_OPENINGS):
        return True
    if b'"role"' not in event:
        return False
    try:
        choices = strict_json.decode(event.partition(b":")[2])["choices"]
        return bool(choices) and all(
            not choice.get("finish_reason") and not any(v for k, v in choice["delta"].items() if k != "role")
            for choice in choices
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def error_payload(event: bytes) -> bytes | None:
    """The JSON of an error event, or None for any other event."""
    if ABORT_MARK in event:
        return b'{"error": {"message": "%b", "code": 500}}' % ABORTED.encode()
    if event.startswith(RESPONSE_ERROR):
        event = event.removeprefix(RESPONSE_ERROR)
    elif not event.startswith(ERROR_PREFIXES):
        return None
    return event.partition(b":")[2].strip()
