"""The one seam at which errors become OpenAI-shaped JSON, and stage answers become errors.

Owns the shape `{"error": {"message", "type", "param", "code"}}`. The named errors themselves live in
`epd_serve.errors`; those below exist only between the proxy and its stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from epd_serve.errors import EpdError, NoInstanceError, OverloadedError, PayloadTooLargeError, RequestError, StageError
from proxy.redact import redacted

NO_INSTANCE_RETRY_AFTER_S = 5.0
MAX_STAGE_MESSAGE_CHARS = 500
MAX_JUDGED_CHARS = 20_000
INTERNAL_ERROR = "internal_error"
ENGINE_DEAD = "EngineCore encountered an issue"
"""How vLLM (0.23 to 0.32, `v1/engine/exceptions.py`) words that its engine has died; the server ends next."""


class StageRefusal(RequestError):
    """A stage answered 4xx: the client's request is at fault, and the stage's own words say how."""

    def __init__(self, message: str, *, status: int, error_type: str, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = error_type


class StageUnreachable(StageError):
    """No connection to the stage: nothing of the request reached it, so trying again costs nobody anything."""

    code = "stage_unreachable"


class StageDied(StageError):
    """The stage went away under the request: its connection broke after it had been sent, its engine says that it is
    dead, or it stopped to report, `ago_s` before that was noticed. What it was doing may have killed it. `for_good`: by
    its own words."""

    def __init__(self, message: str, *, stage: str, ago_s: float = 0.0, for_good: bool = False) -> None:
        super().__init__(message, stage=stage)
        self.ago_s = ago_s
        self.for_good = for_good


class StageFault(StageError):
    """The stage answered 500 and lives. `said`: in which words, the stage's name left out."""

    def __init__(self, said: str, *, stage: str) -> None:
        super().__init__(f"stage {stage} failed with {said}", stage=stage)
        self.said = said


class FaultyBody(RequestError):
    """Two live instances failed on this body with the same words: it is the body's fault, and no instance's."""

    code = "same_fault"


class StageTimeout(StageError):
    """The stage took longer than it may. Another one may do better; the same one would only be asked twice."""

    status = 504
    type = "timeout_error"
    code = "deadline"


class PoisonousRequest(RequestError):
    """Instances died under this very body: it is refused for a while (`proxy/stages/poison.py`)."""

    status = 422
    code = "poisonous_request"


class DrainingError(NoInstanceError):
    """This proxy is coming to an end and takes nothing more."""

    code = "draining"


class BusyError(NoInstanceError):
    """This proxy has no room for what the request needs next, and will have some soon."""


class NotEncoded(NoInstanceError):
    """No encoder produced what stages without one cannot make themselves."""

    code = "not_encoded"


class SlowBodyError(RequestError):
    """The client sends its body more slowly than it may."""

    status = 408
    type = "timeout_error"
    code = "body_too_slow"


class KvNotDelivered(StageError):
    """A prefill instance has computed the prompt and says why the decode instance did not get its KV."""

    code = "kv_not_delivered"

    def __init__(self, reason: str, *, stage: str) -> None:
        super().__init__(f"stage {stage} could not deliver its KV: {reason}", stage=stage)
        self.reason = reason


def internal_error() -> EpdError:
    """What a client is told of a defect of ours. Goes out with `connection: close`: the server closes the connection
    when it sees the exception, which the next request on it should not find out."""
    return EpdError("Internal error of the proxy; its log has the details.", code=INTERNAL_ERROR)


def media_refused(param: str, what: str, code: str) -> RequestError:
    """One media item is not taken."""
    return RequestError(f"{param}: {what}.", param=param, code=code)


def media_too_large(param: str, limit_bytes: int) -> PayloadTooLargeError:
    """One media item is larger than any may be."""
    return PayloadTooLargeError(f"{param}: larger than {limit_bytes:,} bytes.", param=param, code="media_too_large")


def error_body(error: EpdError) -> dict[str, Any]:
    """The OpenAI error object of `error`."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_headers(error: EpdError) -> dict[str, str]:
    """`Retry-After` where waiting helps, and the end of the connection where the rest of a body is still to come, where
    the next request finds another server, or after a defect of ours, which ends it anyway."""
    headers: dict[str, str] = {}
    if isinstance(error, OverloadedError | NoInstanceError):
        after_s = error.retry_after_s if isinstance(error, OverloadedError) else NO_INSTANCE_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, round(after_s)))
    if isinstance(error, SlowBodyError | DrainingError) or error.code == INTERNAL_ERROR:
        headers["connection"] = "close"
    return headers


def error_event(error: EpdError) -> bytes:
    """The single SSE event that ends a stream which failed after its first byte."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"


def response_error_event(error: EpdError) -> bytes:
    """The same for a stream of `/v1/responses`. The fields of its own error event, and beside them the object that
    OpenAI's clients raise for."""
    body = error_body(error)
    event = {"type": "error", **{name: body["error"][name] for name in ("message", "code", "param")}, **body}
    return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


def stage_answer_error(raw: bytes | str, *, stage: str, status: int) -> EpdError:
    """Turn a stage's error answer (body of a non-200 response, or an error event of its stream) into an error.

    Args:
        raw: JSON as vLLM writes it (`{"error": {"message", "type", "param", "code"}}`) or anything else.
        stage: instance id. status: its HTTP status.

    Returns:
        `StageRefusal` for 4xx; `StageError` (a retry is safe before the first byte) for everything else, of which 500
        is a `StageFault`, or `StageDied` when it is the stage's last word.
    """
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    try:
        decoded = json.loads(text)
    except ValueError:
        decoded = None
    fields = decoded.get("error", decoded) if isinstance(decoded, dict) else {}
    if not isinstance(fields, dict):
        fields = {"message": fields}
    said = str(fields.get("message") or text)[:MAX_JUDGED_CHARS]
    message = redacted(said)[:MAX_STAGE_MESSAGE_CHARS] or f"HTTP {status}"
    if 400 <= status < 500:
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
        param, code = (fields[name] if isinstance(fields.get(name), str) else None for name in ("param", "code"))
        return StageRefusal(message, status=status, error_type=kind, param=param, code=code)
    failed = f"stage {stage} failed with {status}: {message}"
    if ENGINE_DEAD in said:
        # by its own words only where they begin so: else some of it may be a client's
        return StageDied(failed, stage=stage, for_good=said.startswith(ENGINE_DEAD))
    return StageFault(f"{status}: {message}", stage=stage) if status == 500 else StageError(failed, stage=stage)


def most_telling(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a failed TaskGroup to answer with: ours, the client's fault, a stage's death, its failure."""
    order = (RequestError, StageDied, EpdError)
    flat = list(_leaves(group))
    return min(flat, key=lambda error: next((at for at, kind in enumerate(order, 1) if isinstance(error, kind)), 0))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from _leaves(inner)
