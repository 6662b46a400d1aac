"""How an answer ended, read from the last bytes of it as they went to the client: why, and with how many tokens.

Nothing is decoded: a whole answer may be megabytes, and what is looked for stands at its end. A key with its quotes
cannot stand within a JSON string, where they would be escaped. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LOOKED_AT_BYTES = 8 << 10

_FINISH_KEY = b'"finish_reason"'
_FINISH = re.compile(rb'"finish_reason": ?"([a-z_]{1,40})"')
_RESPONSE_STATUS = re.compile(rb'"status": ?"(completed|incomplete|failed)"')
_COUNTS = tuple(
    re.compile(rb'"(?:%b)": ?(\d{1,12})' % names)
    for names in (b"prompt_tokens|input_tokens", b"completion_tokens|output_tokens", b"cached_tokens")
)


class AnswerEnd(NamedTuple):
    """`finish`: OpenAI's `finish_reason`, of `/v1/responses` its `status`; "" where neither is said. Counts of tokens
    are None where the stage did not say them: of a stream, unless `stream_options.include_usage` asks for them."""

    finish: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


def answer_end(last: bytes) -> AnswerEnd:
    """Args:
    last: the end of the answer.
    """
    last = last[-LOOKED_AT_BYTES:]
    at = last.rfind(b'"usage":')
    usage = last[at:] if at >= 0 else b""
    counts = [_number(pattern, usage) for pattern in _COUNTS] if usage else [None] * len(_COUNTS)
    return AnswerEnd(_finish(last), *counts)


def _finish(last: bytes) -> str:
    """Of the last choice that says why it ended."""
    if (at := last.rfind(_FINISH_KEY)) >= 0:
        while at >= 0:
            if (match := _FINISH.match(last, at)) is not None:
                return match[1].decode()
            at = last.rfind(_FINISH_KEY, 0, at)
        return ""
    matches = _RESPONSE_STATUS.findall(last)
    return matches[-1].decode() if matches else ""


def _number(pattern: re.Pattern[bytes], usage: bytes) -> int | None:
    matches = pattern.search(usage)
    return int(matches[1]) if matches is not None else None
