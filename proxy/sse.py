"""Server-sent events as vLLM writes them: cut a byte stream into complete events, recognise openings, errors, the end.

Events are never re-encoded; what goes to the client is what the stage sent. No I/O.
"""

from __future__ import annotations

import json

DONE = b"data: [DONE]"
ERROR_PREFIXES = (b'data: {"error"', b'data:{"error"')
# Streams of /v1/responses name their events, and end with one of these. A line break cannot stand inside their JSON.
RESPONSE_OPENINGS = (b"event: response.created\n", b"event: response.in_progress\n")
RESPONSE_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")
RESPONSE_ERROR = b"event: error\n"


class EventSplitter:
    """Feeds on chunks cut anywhere, gives whole events with their blank line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Events completed by `chunk`, in order."""
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        return [event + b"\n\n" for event in whole]


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
        choices = json.loads(event.partition(b":")[2])["choices"]
        return bool(choices) and all(
            not choice.get("finish_reason") and not any(v for k, v in choice["delta"].items() if k != "role")
            for choice in choices
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def error_payload(event: bytes) -> bytes | None:
    """The JSON of an error event, or None for any other event."""
    if event.startswith(RESPONSE_ERROR):
        event = event.removeprefix(RESPONSE_ERROR)
    elif not event.startswith(ERROR_PREFIXES):
        return None
    return event.partition(b":")[2].strip()
