"""One of several proxy processes behind one listening socket: the same application as a proxy that is alone.

What differs is handed in: the status table counts in counters that all workers share, instances come from the parent's
feed, and `/metrics` speaks for all workers. When the feed ends it serves on by the last roster, and asks again: it ends
when it is told to, and when its parent has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from epd_serve.endpoint import unix_url
from epd_serve.errors import DeadlineError
from proxy.background import Background
from proxy.config.keys import ApiKeys
from proxy.errors import most_telling
from proxy.http.app import create_app
from proxy.page.events import Seen
from proxy.page.routes import About, Page
from proxy.pipeline import Pipeline
from proxy.records.records import Question
from proxy.registry.table import InstanceTable
from proxy.server.shared_listener import SharedListener, most_connections
from proxy.server.tls import Certificate
from proxy.server.uvicorn_server import serve
from proxy.workers.ask import TooLargeError, ask
from proxy.workers.metrics_aggregation import own_counts
from proxy.workers.roster import WorkerRoster
from proxy.workers.shared_counters import COUNTS, Asked, Cell, SharedCounters, SharedLedger
from proxy.workers.wire import NO_KEYS, WATCH_S, FeedError, Roster, Setup, Told, unpacked

logger = logging.getLogger(__name__)
SUM_S = 5.0
NOTE_S = 0.02
"""How often a worker says how many connections it takes, which others go by."""

ALONE_S = 0.1
"""How often it looks at what is asked of it where there are no others."""

RECONNECT_S = 0.2
MAX_ANSWER_BYTES = 64 << 20


class Feed:
    """The worker's end of the feed.

    Args:
        path: of the parent's socket. row: of the shared counters, which is this worker's name.

    Attributes:
        informed: set when there is a roster to go by.
    """

    def __init__(self, path: Path, row: int) -> None:
        self.informed = asyncio.Event()
        self._url = unix_url(path)
        self._row = row
        self._parent = os.getppid()
        self._keys = NO_KEYS

    async def setup(self) -> Setup:
        """What this worker is to be like, however long it takes.

        Raises:
            FeedError: the parent has gone, which where the kernel says so has ended this process before, or says what
                no parent says.
        """
        while (answer := await self._answer("setup")) is None:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(RECONNECT_S)
        return unpacked(answer, Setup)

    async def listen(self, roster: Callable[[Roster], None], pipeline: Pipeline) -> None:
        """Take in what the parent says, for ever.

        Args:
            roster: takes one in.

        Raises:
            FeedError: as of `setup`.
        """
        number, ended = 0, False
        while True:
            answer = await self._answer("watch", after=number)
            if ended is not (answer is None):
                ended = not ended
                logger.warning("the feed has ended; requests go by what was said last" if ended else "the feed is back")
            if answer is None:
                await asyncio.sleep(RECONNECT_S)
            elif answer:
                told = unpacked(answer, Told)
                number = told.number
                self._take_in(told, roster, pipeline)

    async def _answer(self, question: str, **more: int) -> bytes | None:
        """None where nobody answers now, or with more than can be said. Raises FeedError."""
        if os.getppid() != self._parent:
            raise FeedError("the parent has gone")
        path = f"/{question}?{urlencode({'row': self._row, **more})}"
        with contextlib.suppress(OSError, TooLargeError):
            return await ask(self._url, path, within_s=WATCH_S + SUM_S, most_bytes=MAX_ANSWER_BYTES)
        return None

    def _take_in(self, told: Told, roster: Callable[[Roster], None], pipeline: Pipeline) -> None:
        handling = pipeline.background.handling
        with handling("Keys"):
            if told.keys != self._keys:  # before instances: with those it serves
                pipeline.callers.go_by(unpacked(told.keys, ApiKeys))
                self._keys = told.keys.copy()  # and not what it came in
        with handling("Roster"):
            if told.roster is not None:
                pipeline.background.elsewhere = told.roster.down
                roster(told.roster)
                self.informed.set()

    async def metrics(self, pipeline: Pipeline) -> bytes:
        """Prometheus text of all workers together. Raises as `observe`."""
        return await self._asked("/metrics")

    async def observe(self, question: Question, whole: bool) -> Seen:
        """A `proxy.page.events.Observe`.

        Raises:
            DeadlineError: the parent does not answer.
        """
        asked = msgspec.msgpack.encode((question, whole))
        return msgspec.msgpack.decode(await self._asked("/seen", asked), type=Seen)

    async def _asked(self, path: str, body: bytes | None = None) -> bytes:
        try:
            return await ask(self._url, path, body=body, within_s=SUM_S, most_bytes=MAX_ANSWER_BYTES)
        except (OSError, TimeoutError, TooLargeError) as error:
            raise DeadlineError(f"the launcher cannot be asked ({error or 'too late'}); try again later") from error


def own_app(pipeline: Pipeline, serves: asyncio.Event) -> Starlette:
    """What this worker answers on a socket of its own: how it is, what it has counted, what it knows of requests.

    Args:
        serves: set once it takes clients' connections.
    """

    async def health(request: Request) -> Response:
        return Response(status_code=200 if serves.is_set() else 503)

    async def counts(request: Request) -> Response:
        return Response(msgspec.msgpack.encode(own_counts(pipeline.metrics.registry)))

    async def records(request: Request) -> Response:
        question = msgspec.msgpack.decode(await request.body(), type=Question)
        return Response(msgspec.msgpack.encode(pipeline.records.look(question)))

    return Starlette(
        routes=[Route("/health", health), Route("/counts", counts), Route("/records", records, methods=["POST"])]
    )


class OwnRow:
    """This worker's row of the shared counters: what it says of itself there, and finds asked of it."""

    def __init__(self, counters: SharedCounters, row: int, shared: SharedListener, pipeline: Pipeline) -> None:
        self._counters = counters
        self._row = row
        self._shared = shared
        self._pipeline = pipeline

    def look(self) -> bool:
        """Returns whether there are others."""
        counters, drain = self._counters, self._pipeline.drain
        counters.say(self._row, Cell.TAKES, self._shared.connections + 1 if self._shared.takes else 0)
        asked = counters.asked
        if asked >= Asked.LEAVE:
            drain.announce()
        if asked >= Asked.DRAIN:
            drain.begin()
        counters.say(self._row, Cell.REQUESTS, drain.running)
        counters.say(self._row, Cell.OBEYED, asked)
        for cell, arrived in zip((Cell.TEXTS, Cell.MEDIA), self._pipeline.gate.queue.arrived.values(), strict=True):
            counters.say(self._row, cell, arrived)
        return counters.least_connections(self._row) is not None

    async def keep(self) -> None:
        while True:  # noqa: ASYNC110 - other processes write there
            await asyncio.sleep(NOTE_S if self.look() else ALONE_S)


@dataclass(frozen=True)
class WorkerSignals:
    """What a worker is told by signals.

    Attributes:
        leave: end when the requests in flight have; others go on. stop: end soon, all do.
    """

    leave: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)


async def run_worker(
    path: Path, row: int, own: socket.socket, listening: socket.socket, counters: int, signals: WorkerSignals
) -> None:
    """Serve until it is told otherwise, or the parent has gone.

    Args:
        path: of the parent's socket. row: of the shared counters. counters: descriptor of their memory.
        own: bound; where the parent asks it.

    Raises:
        FeedError: the parent says what no parent says, or has gone.
    """
    feed = Feed(path, row)
    setup = await feed.setup()
    shared = SharedCounters(mmap.mmap(counters, 0), setup.rows, COUNTS)
    try:
        await _serve(feed, setup, own, listening, shared, row, signals)
    except ExceptionGroup as failed:
        raise most_telling(failed) from None


async def _serve(
    feed: Feed,
    setup: Setup,
    own: socket.socket,
    listening: socket.socket,
    counters: SharedCounters,
    row: int,
    signals: WorkerSignals,
) -> None:
    ledger = SharedLedger(counters, row)
    table = InstanceTable(ledger=ledger, link_grace_s=setup.link_grace_s)
    background = Background()
    app = create_app(setup.settings, table, metrics_text=feed.metrics, background=background)
    pipeline: Pipeline = app.state.pipeline
    page = _page(feed, pipeline)
    app.include_router(page.router)
    certificate = None
    if setup.settings.tls_cert_file:
        certificate = Certificate(setup.settings.tls_cert_file, setup.settings.tls_key_file)
        background.start("certificate", certificate.watch)
    shared = SharedListener(listening, lambda: counters.least_connections(row), certificate, most_connections())
    own_row = OwnRow(counters, row, shared, pipeline)
    worker_roster = WorkerRoster(table)
    serves = asyncio.Event()

    def take_in(roster: Roster) -> None:
        for one in roster.rows:
            ledger.place(one.instance.incarnation_id, one.slot)
        worker_roster.take_in(roster)
        counters.say(row, Cell.ROSTER, roster.number)

    async def front() -> None:
        await feed.informed.wait()
        own_row.look()  # what is asked may have been asked before this process was there
        background.start("notes on the board", own_row.keep)
        grace_s = max(setup.grace_s, setup.drain_s)
        await serve(app, shared=shared, grace_s=grace_s, started=serves.set, ends=page.end, background=background)

    try:
        async with asyncio.TaskGroup() as group:

            def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
                return group.create_task(work)

            serving, fed, answering = (
                start(front()),
                start(feed.listen(take_in, pipeline)),
                start(serve(own_app(pipeline, serves), sockets=[own])),
            )
            leave, stop = start(signals.leave.wait()), start(signals.stop.wait())
            await asyncio.wait((serving, leave, stop), return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()  # it takes no more connections; what is in flight goes on, and so does the feed
            if leave.done():
                await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([serving], timeout=setup.grace_s)
            serving.cancel()
            for task in (leave, stop, fed, answering):
                task.cancel()
    finally:
        await background.stop()


def _page(feed: Feed, pipeline: Pipeline) -> Page:
    """Where there is an admin listener, that one shows the deployment. With API keys each sees its own requests."""
    settings = pipeline.settings

    def tenant(request: Request) -> str:
        own = pipeline.callers.tenant_of(request.headers)
        return own if settings.tells_tenants_apart else ""

    about = About(key="api" if settings.api_keys is not None else "", observes=settings.observed)
    return Page(about, feed.observe, tenant)
