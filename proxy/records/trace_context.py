"""Where a request belongs in a distributed trace: W3C Trace Context, read from its headers and written for its calls.

Source: https://www.w3.org/TR/trace-context/. Pure, but for the dice.
"""

from __future__ import annotations

import re
import secrets

from msgspec import Struct

SAMPLED = 0x01
STATE_CHARS = 512

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(rf"[\x20-\x7e]{{0,{STATE_CHARS}}}")


class TraceContext(Struct, frozen=True):
    """Of one request.

    Attributes:
        trace_id: 32 hex digits. span_id: 16, of the request's own span.
        parent_id: of its client's span, or "" where the trace begins here.
        sampled: the trace is wanted, as the client says; one that begins here is.
        state: `tracestate`, which is passed on as it came.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = True
    state: str = ""

    @classmethod
    def of(cls, traceparent: str, tracestate: str = "") -> TraceContext:
        """From a client's headers; what is malformed counts as not there."""
        found = _PARENT.fullmatch(traceparent.strip())
        if found is None or not _is_valid(*found.groups()):
            return cls(secrets.token_hex(16), new_span_id())
        _, trace_id, parent_id, flags, _ = found.groups()
        state = tracestate if _STATE.fullmatch(tracestate) else ""
        return cls(trace_id, new_span_id(), parent_id, bool(int(flags, 16) & SAMPLED), state)

    def headers(self, span_id: str) -> dict[str, str]:
        """Of a call whose span is this one, or "" where it has none of its own."""
        headers = {"traceparent": f"00-{self.trace_id}-{span_id or self.span_id}-{int(self.sampled):02x}"}
        return headers | {"tracestate": self.state} if self.state else headers


def new_span_id() -> str:
    """One that nobody else has; all zeros would mean none."""
    return secrets.token_hex(8).replace("0" * 16, "0" * 15 + "1")


def _is_valid(version: str, trace_id: str, parent_id: str, flags: str, more: str | None) -> bool:
    """Of a later version there may be more behind; none of ours has."""
    return version != "ff" and bool(trace_id.strip("0") and parent_id.strip("0")) and (version != "00" or more is None)
