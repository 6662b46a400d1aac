"""The client's own deadline: `x-epd-deadline-ms`, the time from arrival within which the whole answer is wanted."""

from __future__ import annotations

from starlette.datastructures import Headers

from epd_serve.errors import DeadlineError, RequestError

HEADER = "x-epd-deadline-ms"
MAX_MS = 24 * 3600 * 1000


class DeadlineLapsed(DeadlineError):
    """The time that the client gave has passed: everything done for it was cancelled."""

    code = "deadline_exceeded"


class DeadlineUnreachable(DeadlineError):
    """The time that the client gave cannot suffice: nothing was done."""

    code = "deadline_unreachable"


def deadline_s(headers: Headers) -> float | None:
    """Seconds from arrival, or None without the header.

    Raises:
        RequestError: it is no number of milliseconds.
    """
    values = headers.getlist(HEADER)
    if not values:
        return None
    text = values[0].strip()
    if len(values) > 1 or not (text.isascii() and text.isdecimal()) or len(text) > 9 or not 1 <= int(text) <= MAX_MS:
        raise RequestError(
            f"The header {HEADER} must be sent once, as whole milliseconds between 1 and {MAX_MS}.", param=HEADER
        )
    return int(text) / 1000
