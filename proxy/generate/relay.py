"""Relay a stage's event stream to the client: bytewise, committed at the first event of an answer, never silently cut.

vLLM reports failures inside a stream as an error event followed by [DONE], which clients would score as success.
Here such an event becomes an error: retried by the caller before the commit point, fatal for the connection after.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from epd_serve.errors import StageError
from proxy import strict_json
from proxy.errors import stage_answer_error
from proxy.request.client_sink import ClientSink
from proxy.stages.sse import DONE, error_payload, is_comment, is_done, is_last, is_opening, is_plain, split


async def relay(
    events: AsyncIterator[bytes], sink: ClientSink, *, stage: str, on_first: Callable[[], None] = lambda: None
) -> None:
    """Copy `events` to `sink` up to and including [DONE].

    Args:
        events: complete SSE events, any number at a time. stage: instance id, for errors. on_first: called at the
            commit point.

    Raises:
        StageError: the stream failed or ended without [DONE]. StageRefusal: it failed with a 4xx.
    """
    held = b""  # openings: what follows them may still be an error, which is retried only before the commit point
    async for several in events:
        if sink.committed and is_plain(several):
            if DONE not in several:
                await sink.write(several)
                continue
            if is_last(several):
                await sink.finish(several)
                return
        ready, held, failure, ended = _sift(held, several, committed=sink.committed)
        if ready:
            if not sink.committed:
                on_first()
                await sink.start_stream()
            if ended:
                await sink.finish(ready)
                return
            await sink.write(ready)
        if failure is not None:
            raise stage_answer_error(failure, stage=stage, status=_status_in(failure))
    raise StageError(f"stage {stage} ended its stream early", stage=stage)


def _sift(held: bytes, several: bytes, *, committed: bool) -> tuple[bytes, bytes, bytes | None, bool]:
    """Event by event: (what the client gets now, what is held back, the error that ends the stream, whether it is
    over). Nothing behind an error or [DONE] counts, and before the commit point nothing in the same read before an
    error: the client has none of it yet, so the attempt may be repeated."""
    ready = b""
    for event in split(several):
        failure = error_payload(event)
        if failure is not None:
            return ready if committed else b"", held, failure, False
        if not (committed or ready):
            if is_comment(event):
                continue
            if is_opening(event):
                held += event
                continue
        ready, held = ready + held + event, b""
        if is_done(event):
            return ready, held, None, True
    return ready, held, None, False


def _status_in(payload: bytes) -> int:
    """The HTTP status that vLLM puts into `error.code`; 500 when it is absent."""
    try:
        code = strict_json.decode(payload)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500
