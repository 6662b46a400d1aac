"""Relay a stage's event stream to the client: bytewise, committed at the first event of an answer, never silently cut.

vLLM reports failures inside a stream as an error event followed by [DONE], which clients would score as success.
Here such an event becomes an error: retried by the caller before the commit point, fatal for the connection after.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from epd_serve.errors import StageError
from proxy import strict_json
from proxy.errors import stage_answer_error
from proxy.generate.first_token import Continuation, FirstEvent
from proxy.request.client_sink import ClientSink
from proxy.stages.sse import DONE, error_payload, is_comment, is_done, is_last, is_opening, is_plain, split


def _nothing() -> None: ...


async def relay(
    events: AsyncIterator[bytes],
    sink: ClientSink,
    *,
    stage: str,
    on_first: Callable[[], None] = _nothing,
    opening: asyncio.Lock | None = None,
) -> None:
    """Copy `events` to `sink` up to and including [DONE], but for what the client has of them (`sink.shown`).

    Args:
        events: complete SSE events, any number at a time. stage: instance id, for errors. on_first: called with the
            first event of an answer, before the client gets any of it.
        opening: held by whoever begins the answer; two may be about to (`show`).

    Raises:
        StageError: the stream failed or ended without [DONE]. StageRefusal: it failed with a 4xx.
    """
    held = b""  # openings: what follows them may still be an error, which is retried only before the commit point
    answered = begun = False  # by the stage; with the client
    passing = False  # all that comes is the client's
    opening = opening or asyncio.Lock()
    going_on: Continuation | None = None
    async for several in events:
        if passing and is_plain(several):
            if DONE not in several:
                await sink.write(several)
                continue
            if is_last(several):
                await sink.finish(several)
                return
        ready, held, failure, ended = _sift(held, several, committed=begun)
        if ready:
            if not answered:
                answered = True
                on_first()
            async with opening:
                if sink.shown is not None and going_on is None:
                    going_on = Continuation(sink.shown, stage=stage)
                if going_on is not None:
                    ready = going_on.rest(ready)
                if ready:
                    begun, sink.shown = True, None
                    if not sink.committed:
                        await sink.start_stream()
                    if ended:
                        await sink.finish(ready)
                        return
                    await sink.write(ready)
            passing = begun and (going_on is None or going_on.done)
        if failure is not None:
            raise stage_answer_error(failure, stage=stage, status=_status_in(failure))
    raise StageError(f"stage {stage} ended its stream early", stage=stage)


async def show(
    events: AsyncIterator[bytes],
    sink: ClientSink,
    body: Mapping[str, Any],
    *,
    stage: str,
    opening: asyncio.Lock,
    on_first: Callable[[], None],
    on_whole: Callable[[], None],
) -> None:
    """Show the client the first token of P's `events`, where it may be shown and D has not been sooner. To the end.

    Args:
        body: the client's. on_first: called before the client gets anything. on_whole: called where it then gets all of
            this stream, and nothing else: D must be left.

    Raises:
        As `relay`; KvNotDelivered: P says that D will not get the KV.
    """
    held, first = b"", None
    async for several in events:
        rest = several
        for event in split(several):
            rest = rest[len(event) :]
            failure = error_payload(event)
            if failure is not None:
                raise stage_answer_error(failure, stage=stage, status=_status_in(failure))
            if is_done(event):
                return
            if first is None and is_opening(event):
                held += event
            elif first is None and not is_comment(event):
                first = FirstEvent(event, body, stage=stage)
                async with opening:
                    if sink.committed:
                        continue
                    if first.whole:
                        on_whole()
                    elif first.shown is not None:
                        on_first()
                        sink.shown = first.shown
                        await sink.start_stream()
                        await sink.write(held + first.public)
                if first.whole:
                    await relay(_following(held + event + rest, events), sink, stage=stage, on_first=on_first)
                    return
    raise StageError(f"stage {stage} ended its stream early", stage=stage)


async def _following(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for several in events:
        yield several


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
