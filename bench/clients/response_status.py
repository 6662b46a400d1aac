"""What became of a request: answered whole, refused, broken off, garbage. Pure; the one place that decides it.

Servers fail in ways that clients have counted as success: an error event followed by `[DONE]`, a stream that ends
without one, an answer shorter than `ignore_eos` demands. None of them is one here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.clients.http import Response
from bench.clients.records import Outcome
from bench.clients.sse import Reading, shortened

REFUSALS = frozenset({"status 429", "status 503"})
"""Faults by which a server says that it is overloaded: a measured result, not a run gone wrong."""
UNREACHABLE = "unreachable"
CROWDED = "not sent: too many under way"
ERROR_EVENT = "error event"
CUT = "cut"


@dataclass(frozen=True, slots=True)
class ResponseStatus:
    """`fault` is what errors are counted by; `error` is what the server said."""

    outcome: Outcome
    fault: str = ""
    error: str = ""


OK = ResponseStatus(Outcome.OK)


def judge(
    response: Response, reading: Reading | None, *, stream: bool = True, expected_tokens: int | None = None
) -> ResponseStatus:
    """Judges an answer that has come, or broken off by itself.

    Args:
        reading: None where the body was not kept: it is then judged by its end alone.
        expected_tokens: that the request asked for with `ignore_eos`; None where any number is right.
    """
    if response.garbage:
        return ResponseStatus(Outcome.ERROR, "garbage", response.garbage)
    if response.status == 0:
        return ResponseStatus(Outcome.ERROR, "broken", "the connection was lost before an answer began")
    if response.status != 200:
        return ResponseStatus(Outcome.ERROR, f"status {response.status}", shortened(response.tail))
    if reading is None or not (stream or response.ended_s):
        return _by_its_end(response, stream=stream)
    if reading.garbage:
        return ResponseStatus(Outcome.ERROR, "garbage", reading.garbage)
    if reading.error:
        return ResponseStatus(Outcome.ERROR, ERROR_EVENT, reading.error)
    if not reading.done:
        cut = "ended without [DONE]" if response.ended_s else "was cut off"
        return ResponseStatus(Outcome.TRUNCATED, CUT, f"the answer {cut} after {len(reading.content_s)} events")
    if not reading.content_s:
        return ResponseStatus(Outcome.ERROR, "empty", "a whole answer without any content")
    tokens = reading.completion_tokens
    if expected_tokens is not None and tokens is not None and tokens < expected_tokens:
        short = f"{tokens} tokens of {expected_tokens}, finish_reason {reading.finish_reason!r}"
        return ResponseStatus(Outcome.TRUNCATED, "short", short)
    return OK


def _by_its_end(response: Response, *, stream: bool) -> ResponseStatus:
    if response.whole(stream=stream):
        return OK
    if stream and b'"error"' in response.tail and b"[DONE]" not in response.tail:
        return ResponseStatus(Outcome.ERROR, ERROR_EVENT, shortened(response.tail))
    return ResponseStatus(Outcome.TRUNCATED, CUT, shortened(response.tail))
