"""Relay a stage's event stream to the client: bytewise, committed at the first event of an answer, never silently cut.

vLLM reports failures inside a stream as an error event followed by [DONE], which clients would score as success.
Here such an event becomes an error: retried by the caller before the commit point, fatal for the connection after.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

from epd_serve.errors import StageError
from proxy.errors import stage_answer_error
from proxy.sink import ClientSink
from proxy.sse import error_payload, is_comment, is_done, is_opening


async def relay(
    events: AsyncIterator[bytes], sink: ClientSink, *, stage: str, on_first: Callable[[], None] = lambda: None
) -> None:
    """Copy `events` to `sink` up to and including [DONE].

    Args:
        events: complete SSE events. stage: instance id, for errors. on_first: called at the commit point.

    Raises:
        StageError: the stream failed or ended without [DONE]. StageRefusal: it failed with a 4xx.
    """
    held = b""  # openings: what follows them may still be an error, which is retried only before the commit point
    async for event in events:
        failure = error_payload(event)
        if failure is not None:
            raise stage_answer_error(failure, stage=stage, status=_status_in(failure))
        ended = is_done(event)
        if not sink.committed:
            if is_comment(event):
                continue
            if is_opening(event):
                held += event
                continue
            on_first()
            await sink.start_stream()
            event = held + event
        await sink.write(event)
        if ended:
            await sink.finish()
            return
    raise StageError(f"stage {stage} ended its stream early", stage=stage)


def _status_in(payload: bytes) -> int:
    """The HTTP status that vLLM puts into `error.code`; 500 when it is absent."""
    try:
        code = json.loads(payload)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500
