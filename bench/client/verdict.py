"""What an answer was: whole, refused, broken off, garbage. Pure; the one place that decides it.

Servers fail in ways that clients have counted as success: an error event followed by `[DONE]`, a stream that ends
without one, an answer shorter than `ignore_eos` demands. None of them is one here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.client.connection import Answer
from bench.client.row import Outcome
from bench.client.sse import Reading, said

REFUSALS = frozenset({"status 429", "status 503"})
"""Faults by which a server says that it is overloaded: a measured result, not a run gone wrong."""
UNREACHABLE = "unreachable"
CROWDED = "not sent: too many under way"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`fault` counts errors by kind; `error` is what was said."""

    outcome: Outcome
    fault: str = ""
    error: str = ""


OK = Verdict(Outcome.OK)


def judge(answer: Answer, reading: Reading, expected_tokens: int | None) -> Verdict:
    """Of an answer that has come, or broken off by itself.

    Args:
        expected_tokens: that the request asked for with `ignore_eos`; None where any number is right.
    """
    if answer.garbage:
        return Verdict(Outcome.ERROR, "garbage", answer.garbage)
    if answer.status == 0:
        return Verdict(Outcome.ERROR, "broken", "the connection was lost before an answer began")
    if answer.status != 200:
        return Verdict(Outcome.ERROR, f"status {answer.status}", said(answer.tail))
    if reading.garbage:
        return Verdict(Outcome.ERROR, "garbage", reading.garbage)
    if reading.error:
        return Verdict(Outcome.ERROR, "error event", reading.error)
    if not reading.done:
        cut = "ended without [DONE]" if answer.ended else "was cut off"
        return Verdict(Outcome.TRUNCATED, "cut", f"the stream {cut} after {len(reading.content_s)} events with content")
    if not reading.content_s:
        return Verdict(Outcome.ERROR, "empty", "a whole answer without any content")
    found = reading.completion_tokens
    if expected_tokens is not None and found is not None and found < expected_tokens:
        short = f"{found} tokens of {expected_tokens}, finish_reason {reading.finish_reason!r}"
        return Verdict(Outcome.TRUNCATED, "short", short)
    return OK
