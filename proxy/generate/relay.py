"""Relay a stage's event stream to the client: committed at the first event of an answer, never silently cut.

vLLM reports failures inside a stream as an error event followed by [DONE], which clients would score as success.
Here such an event becomes an error: retried by the caller before the commit point, fatal for the connection after.

A stream may begin with P's first token (`show`): P answers the client's own request, but ends there; D, which is made
to sample the same one (`epd_serve.engine.forced_tokens`), goes on after it. Its client must not be able to tell, so of
what `may_be_shown` lets pass only that is shown with which D's stream is sure to begin. A token with which P's answer
*stops* is the whole answer, and D is not needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from epd_serve.errors import EpdError, StageError
from epd_serve.wire import KV_NOT_SENT, TOKEN_SENT
from proxy import strict_json
from proxy.errors import KvNotDelivered, stage_answer_error
from proxy.request.client import ClientSink
from proxy.stages.history import TEXT, Continuation, TokenHistory, read, written
from proxy.stages.sse import DONE, ROLE, Event, is_plain, split, without_ids


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

    def check_prompt(self, events: Iterable[Event], stage: str) -> None:
        """Look at the first events of an answer.

        Raises:
            StageError: the answer before was to another prompt, as after a change of the chat template.
        """
        for event in events:
            if event.chunk is not None and (prompt := event.chunk.prompt):
                if self.history.begun and self.history.prompt not in (None, hash(prompt)):
                    raise StageError(f"stage {stage} makes another prompt of the request", stage=stage)
                self.history.prompt = hash(prompt)

    def take(self, events: Iterable[Event], *, ahead: bool = False) -> bytes:
        """What it is to be sent of these events of a stage, which is kept as sent.

        Args:
            ahead: of another stage, which goes on after them whether or not what that one says is kept.
        """
        public: list[bytes] = []
        history = self.history
        keeps, hides = self.keeps or ahead, self.hides
        if not history.begun:
            history.begin()
        if not keeps and not history.why_not:
            history.give_up("its stage was not asked for ids of tokens")
        for event in events:
            if event.done:
                if history.migrations:
                    public.append(b": x-epd-migrations: %d\n\n" % history.migrations)
            elif keeps and not event.comment:
                history.add(event.chunk, ahead)
            if event.goes_on or not (hides and event.only_ids):
                public.append(event.raw)
        said = b"".join(public)
        return without_ids(said) if hides else said


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
    sink, history, reads = client.sink, client.history, client.hides or client.keeps
    held: list[Event] = []  # what follows them may still be an error, which is retried only before the commit point
    answered = begun = False  # by the stage; with the client
    opening = opening or asyncio.Lock()
    going_on: Continuation | None = None
    async for several in events:
        if begun and not (reads or going_on) and is_plain(several):
            await sink.write(several)
            continue
        news, failure = _read(several)
        if failure is not None and not begun:  # nor has the client any of what came with it
            raise _failed(failure, stage)
        if not begun:
            news = [event for event in news if not event.comment]
        if not answered:
            news = [*held, *news]
            if all(event.opening for event in news):
                held = news
                continue
            if len(news) > 1 and all(event.opening or event.data == DONE for event in news):
                raise StageError(f"stage {stage} ended its stream without an answer", stage=stage)
            client.check_prompt(news, stage)
            answered = True
            on_first()
        if not begun:
            async with opening:
                if going_on is None and history.begun:
                    going_on = Continuation(history, stage=stage)
                if going_on is not None:
                    news = going_on.rest(news)
                if not news:
                    continue
                begun = True
                on_news()
                if not sink.committed:
                    await sink.start_stream()
        elif going_on is not None:
            news = going_on.rest(news)
        said = client.take(news)
        said = going_on.dated(said) if going_on is not None else said
        if news and news[-1].done:
            return await sink.finish(said)
        if said:
            await sink.write(said)
        if failure is not None:
            raise _failed(failure, stage)
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
    sink, held, waits = client.sink, list[Event](), True
    async for several in events:
        news, failure = _read(several)
        if failure is not None:
            raise _failed(failure, stage)
        for number, event in enumerate(news):
            if event.done:
                return
            if not waits or event.comment:
                continue
            if event.opening:
                held.append(event)
                continue
            waits = False
            shown = first_token(event, body, stage=stage)
            async with opening:
                if shown is None or sink.committed:
                    continue
                if shown is event:
                    on_whole()
                else:
                    on_first()
                    await sink.start_stream()
                    await sink.write(client.take([*held, shown], ahead=True))
            if shown is event:
                whole = b"".join(one.raw for one in (*held, *news[number:]))
                return await relay(_following(whole, events), client, stage=stage, on_first=on_first)
    raise StageError(f"stage {stage} ended its stream early", stage=stage)


def first_token(event: Event, body: Mapping[str, Any], *, stage: str) -> Event | None:
    """What the client may be shown of P's first event of an answer: the event itself where P's answer ends there for
    the client, too, else as it would be were it not the last one, with the token's id. None where D is waited for:

        text that may be the beginning of a stop string  vLLM holds it back until it knows, but not at the end
        no text                                          part of a character, or a token that is not shown
        something else than text                         what a parser has found

    Raises:
        KvNotDelivered: D will not get what it needs to go on. StageError: no event of an answer.
    """
    answer, choice = read(event, stage)
    if choice.get("finish_reason") == "stop":
        return event
    said = choice.get("stop_reason")
    if choice.get("finish_reason") != "length" or not isinstance(said, str):
        return None
    if said.startswith(KV_NOT_SENT):
        raise KvNotDelivered(said.removeprefix(KV_NOT_SENT), stage=stage)
    told = {name: value for name, value in choice.get("delta", {TEXT: choice.get(TEXT)}).items() if value}
    told.pop(ROLE, None)
    text = told.pop("content" if "delta" in choice else TEXT, None)
    if told or not isinstance(text, str) or not said.startswith(TOKEN_SENT):
        return None
    stop = () if body.get("include_stop_str_in_output") else body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop  # which vLLM keeps out of the text
    if any(text.endswith(one[:length]) for one in stops for length in range(1, len(one))):
        return None
    choice["finish_reason"] = choice["stop_reason"] = None
    if "delta" in choice:
        del choice["stop_reason"]
    answer.pop("system_fingerprint", None)  # stands in last events
    choice["token_ids"] = [int(said.removeprefix(TOKEN_SENT))]
    return Event(written(answer))


def _read(several: bytes) -> tuple[list[Event], bytes | None]:
    """(whole events up to the end of their stream, the error that ends it). What is behind either does not count."""
    events: list[Event] = []
    for raw in split(several):
        event = Event(raw)
        if not event.goes_on and (failure := event.failure) is not None:
            return events, failure
        events.append(event)
        if event.done:
            break
    return events, None


async def _following(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for several in events:
        yield several


def _failed(payload: bytes, stage: str) -> EpdError:
    """The error in an event, with the HTTP status that vLLM puts into `error.code`; 500 where it is absent."""
    try:
        code = strict_json.decode(payload)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = 500
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return stage_answer_error(payload, stage=stage, status=status)
