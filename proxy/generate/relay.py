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
from proxy.generate.continuation import Continuation
from proxy.generate.first_token import FirstEvent
from proxy.generate.token_event import (
    TokenForm,
    prompt_digest,
    token_form,
    without_ids,
    without_prompt_ids,
)
from proxy.request.client_sink import ClientSink
from proxy.stages.sse import (
    BLANK_LINE,
    DONE,
    data_of,
    error_payload,
    is_comment,
    is_done,
    is_opening,
    last_of,
    may_fail,
    split,
)
from proxy.stages.token_history import TokenHistory


def _nothing() -> None: ...


class Client:
    """The client of one stream, and what is kept of what it gets.

    Args:
        history: what it has. hides: ids of tokens are among the events for our sake, not for its own. keeps: another
            stage can go on after what it is sent.
    """

    __slots__ = ("hides", "history", "keeps", "sink")

    def __init__(self, sink: ClientSink, history: TokenHistory, *, hides: bool = False, keeps: bool = False) -> None:
        self.sink = sink
        self.history = history
        self.hides = hides
        self.keeps = keeps

    def same_prompt(self, events: bytes, stage: str) -> bytes:
        """The first events of an answer, without the ids of the prompt where the client wants none.

        Raises:
            StageError: the answer before was to another prompt, as after a change of the chat template.
        """
        if (digest := prompt_digest(events)) is None:
            return events
        if self.history.begun and self.history.prompt not in (None, digest):
            raise StageError(f"stage {stage} makes another prompt of the request", stage=stage)
        self.history.prompt = digest
        return without_prompt_ids(events) if self.hides else events

    async def write(self, events: bytes) -> None:
        """Send the client what it is to have of these whole events of a stage."""
        public = without_ids(events) if self.hides else events
        if public:
            await self.sink.write(public)
        self.history.begin()
        if self.keeps:
            self.history.add(events)
        elif not self.history.why_not:
            self.history.give_up("its stage was not asked for ids of tokens")

    async def show(self, events: bytes) -> None:
        """Send it P's first token, after which D goes on whether or not what D says is kept."""
        await self.sink.write(without_ids(events) if self.hides else events)
        self.history.begin()
        self.history.add(events)

    async def finish(self, events: bytes) -> None:
        """Send it these, the last of which is [DONE]."""
        if self.hides:
            events = without_ids(events)
        if self.history.migrations:
            note = b": x-epd-migrations: %d" % self.history.migrations + BLANK_LINE
            end = last_of(events)
            events = events.removesuffix(end) + note + end
        await self.sink.finish(events)


async def relay(
    events: AsyncIterator[bytes],
    client: Client,
    *,
    stage: str,
    on_first: Callable[[], None] = _nothing,
    on_news: Callable[[], None] = _nothing,
    opening: asyncio.Lock | None = None,
) -> None:
    """Copy `events` to `client` up to and including [DONE], but for what it has of them.

    Args:
        events: complete SSE events, any number at a time. stage: instance id, for errors. on_first: called with the
            first event of an answer. on_news: called before the client gets anything of it.
        opening: held by whoever begins the answer; two may be about to (`show`).

    Raises:
        StageError: the stream failed or ended without [DONE]. StageRefusal: it failed with a 4xx.
    """
    sink, history, hides, keeps = client.sink, client.history, client.hides, client.keeps
    held = b""  # openings: what follows them may still be an error, which is retried only before the commit point
    answered = begun = False  # by the stage; with the client
    passing = False  # all that comes is the client's
    form: TokenForm | None = None
    opening = opening or asyncio.Lock()
    going_on: Continuation | None = None
    async for several in events:
        if form is not None and (public := form.without_ids(several)) is not None:  # as below, for a third of it
            await sink.write(public if hides else several)
            if keeps:
                history.add(several)
            continue
        fails = may_fail(several)
        if passing and not fails:
            if going_on is not None:
                several = going_on.dated(several)
            if DONE not in several:
                await client.write(several)
                continue
            if is_done(last_of(several)):
                await client.finish(several)
                return
        if not answered:
            several = client.same_prompt(several, stage)
        ready, held, failure, ended = _sift(held, several, committed=begun, fails=fails)
        if ready:
            if not answered:
                if ended and _says_nothing(ready):
                    raise StageError(f"stage {stage} ended its stream without an answer", stage=stage)
                answered = True
                on_first()
            async with opening:
                if not begun and going_on is None and history.begun:
                    going_on = Continuation(history, stage=stage)
                if going_on is not None:
                    ready = going_on.rest(ready)
                if ready:
                    if not begun:
                        begun = True
                        on_news()
                    if not sink.committed:
                        await sink.start_stream()
                    if ended:
                        await client.finish(ready)
                        return
                    await client.write(ready)
                    form = token_form(ready) if going_on is None else None
            passing = begun and (going_on is None or going_on.done)
        if failure is not None:
            raise stage_answer_error(failure, stage=stage, status=_status_in(failure))
    raise StageError(f"stage {stage} ended its stream early", stage=stage)


async def show(
    events: AsyncIterator[bytes],
    client: Client,
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
    sink = client.sink
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
                    elif first.public:
                        on_first()
                        await sink.start_stream()
                        await client.show(held + first.public)
                if first.whole:
                    await relay(_following(held + event + rest, events), client, stage=stage, on_first=on_first)
                    return
    raise StageError(f"stage {stage} ended its stream early", stage=stage)


async def _following(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for several in events:
        yield several


def _sift(held: bytes, several: bytes, *, committed: bool, fails: bool) -> tuple[bytes, bytes, bytes | None, bool]:
    """Event by event: (what the client gets now, what is held back, the error that ends the stream, whether it is
    over). Nothing behind an error or [DONE] counts, and before the commit point nothing in the same read before an
    error: the client has none of it yet, so the attempt may be repeated. `fails`: one of them may be an error, or have
    a name."""
    ready = b""
    for event in split(several):
        failure = error_payload(event) if fails else None
        if failure is not None:
            return ready if committed else b"", held, failure, False
        if not (committed or ready):
            if is_comment(event):
                continue
            if is_opening(event):
                held += event
                continue
        ready, held = ready + held + event, b""
        if (fails or DONE in event) and is_done(event):
            return ready, held, None, True
    return ready, held, None, False


def _says_nothing(events: bytes) -> bool:
    """Whether they are an answer without a choice, as a stage gives that is being ended."""
    every = split(events)
    empty = all(is_opening(event) or data_of(event) == DONE or _has_no_choice(event) for event in every)
    return empty and data_of(every[0]) != DONE


def _has_no_choice(event: bytes) -> bool:
    try:
        answer = strict_json.decode(data_of(event))
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and answer.get("choices") == []


def _status_in(payload: bytes) -> int:
    """The HTTP status that vLLM puts into `error.code`; 500 when it is absent."""
    try:
        code = strict_json.decode(payload)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500
