"""What must not stand in a log or in another's error: tokens, data URLs, credentials and query strings of URLs.

Clients' images and signed URLs come back in the words of stages and libraries. Those are cut where they enter
(`proxy/errors.py`), and once more where log records leave, tracebacks included.
"""

from __future__ import annotations

import logging
import re

DATA_URL = re.compile(r"data:([\w.+-]{0,40}/?[\w.+-]{0,40})[;,][^\s'\"<>\\]*", re.IGNORECASE)
URL_SECRETS = re.compile(
    r"\b([a-zA-Z][a-zA-Z0-9+.-]{1,10}://)(?:[^\s/?#'\"<>@]*@)?([^\s?#'\"<>\\]*)(?:[?#][^\s'\"<>\\]*)?"
)
BEARER = re.compile(r"\b(bearer|basic)\s+[^\s'\",}]+", re.IGNORECASE)
LONG_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{120,}={0,2}")


def redacted(text: str) -> str:
    """`text` without them. Ids, digests and paths stay."""
    text = DATA_URL.sub(r"data:\1,...", text)
    text = URL_SECRETS.sub(lambda match: f"{match[1]}{match[2]}", text)
    text = BEARER.sub(r"\1 ...", text)
    return LONG_BASE64.sub("...", text)


class RedactingFilter(logging.Filter):
    """Rewrites what it lets pass, which is everything."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # its words and values do not fit: no reason to fail whoever says so
            message = f"{record.msg} {record.args}"
        record.msg, record.args = redacted(message), None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        return True


def redact_logs() -> None:
    """Put the filter where records of this process leave: at the root's handlers, at the one that stands in where there
    are none, and at uvicorn's loggers, which have handlers of their own. Again is harmless."""
    uvicorn = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error")]
    for place in (*logging.getLogger().handlers, logging.lastResort, *uvicorn):
        if place is not None and not any(isinstance(one, RedactingFilter) for one in place.filters):
            place.addFilter(RedactingFilter())
