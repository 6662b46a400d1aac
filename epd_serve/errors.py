"""Named errors of EPD-Serve. Each knows its HTTP status, its OpenAI type and code, and whether a retry is safe.

`assert` states our own invariants; whatever a user or a peer can cause is one of these. The proxy turns them
into OpenAI-shaped JSON at one seam (`proxy/errors.py`), the CLI prints `str(error)` as one line.
"""

from __future__ import annotations


class EpdError(Exception):
    """Base of every error we raise on purpose.

    Attributes:
        status: HTTP status the proxy answers with.
        type: OpenAI error type (`invalid_request_error`, `server_error`, ...).
        code: stable machine-readable code, or None.
        param: the request field or flag at fault, or None.
        retryable: True when the same request may succeed elsewhere or later.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(EpdError):
    """A flag, key or file given by the operator is wrong. The message names it and the fix."""

    type = "configuration_error"


class LayoutError(ConfigError):
    """A layout string does not parse or cannot serve. `str()` carries the string and a caret under the fault."""

    def __init__(self, reason: str, spec: str, position: int) -> None:
        self.reason = reason
        self.spec = spec
        self.position = position
        super().__init__(f"layout: {reason}\n  {spec}\n  {' ' * position}^", param="--layout")


class RequestError(EpdError):
    """The client's request is wrong: 4xx, never retried."""

    status = 400
    type = "invalid_request_error"


class NotFoundError(RequestError):
    """Unknown model or route."""

    status = 404
    type = "not_found_error"


class PayloadTooLargeError(RequestError):
    """Body or media beyond a limit."""

    status = 413


class OverloadedError(EpdError):
    """Admission refused for now: 429 with Retry-After."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoInstanceError(EpdError):
    """No live instance can take the next stage of this request."""

    status = 503
    type = "service_unavailable_error"
    code = "no_instance"
    retryable = True


class StageError(EpdError):
    """A stage failed or broke its connection while it held the request."""

    status = 502
    type = "server_error"
    code = "stage_failed"
    retryable = True

    def __init__(self, message: str, *, stage: str, status: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        if status is not None:
            self.status = status


class DeadlineError(EpdError):
    """A wait reached its deadline."""

    status = 504
    type = "timeout_error"
    code = "deadline"
    retryable = True
