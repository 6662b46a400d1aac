"""One of several proxy processes behind one listening socket: the same application as a proxy that is alone.

What differs is handed in: the status table counts in counters that all workers share, instances come from the parent's
feed, and `/metrics` speaks for all workers. It ends when it is told to, and when the parent's end of the feed closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from epd_serve.errors import DeadlineError, OverloadedError
from proxy.background import Background
from proxy.errors import most_telling
from proxy.http.app import create_app
from proxy.pipeline import Pipeline
from proxy.registry.table import InstanceTable
from proxy.server.shared_listener import SharedListener
from proxy.server.uvicorn_server import serve
from proxy.workers.metrics_aggregation import exposition, own_counts
from proxy.workers.roster import WorkerRoster
from proxy.workers.shared_counters import SharedCounters
from proxy.workers.shared_ledger import COUNTS, SharedLedger
from proxy.workers.wire import (
    CountsQuery,
    CountsReply,
    Drain,
    FeedError,
    FromParent,
    FromWorker,
    Leave,
    Roster,
    Running,
    Serving,
    Setup,
    TotalQuery,
    TotalReply,
    decoded,
    frame,
    from_parent,
    read_frame,
)

SUM_S = 5.0
NOTE_S = 0.02
"""How often a worker looks at what others have acquired: much less than `proxy.registry.load.REPORT_LAG_S`."""

MAX_QUESTIONS = 256


class Feed:
    """The worker's end of the feed. `listen` runs as long as the worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[TotalReply]] = {}
        self._drain: asyncio.Task[None] | None = None

    async def setup(self) -> Setup | None:
        """The first message; None when the parent has gone."""
        raw = await read_frame(self._reader)
        if raw is None:
            return None
        message = decoded(raw, from_parent)
        if not isinstance(message, Setup):
            raise FeedError(f"the first message is a {type(message).__name__}")
        return message

    async def listen(self, roster: WorkerRoster, pipeline: Pipeline) -> None:
        """Take in what the parent says, until it has gone."""
        while (raw := await read_frame(self._reader)) is not None:
            message = decoded(raw, from_parent)
            if isinstance(message, Setup):
                raise FeedError("a second setup")
            with pipeline.background.handling(type(message).__name__):
                self._take_in(message, roster, pipeline)

    def _take_in(self, message: FromParent, roster: WorkerRoster, pipeline: Pipeline) -> None:
        match message:
            case Roster():
                pipeline.background.elsewhere = message.down
                roster.take_in(message.rows)
            case CountsQuery():
                self.say(CountsReply(message.number, own_counts(pipeline.metrics.registry), pipeline.drain.running))
            case Leave():
                pipeline.drain.announce()
            case Drain():
                pipeline.drain.begin()
                self.say(Running(pipeline.drain.running))
                self._drain = asyncio.create_task(self._say_idle(pipeline))
            case TotalReply():
                waiting = self._pending.get(message.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)

    async def _say_idle(self, pipeline: Pipeline) -> None:
        await pipeline.drain.idle()
        self.say(Running(0))

    def say(self, message: FromWorker) -> None:
        with contextlib.suppress(ConnectionError):  # `listen` notices
            self._writer.write(frame(message))

    async def metrics(self, pipeline: Pipeline) -> bytes:
        """Prometheus text of all workers together.

        Raises:
            DeadlineError: the parent does not answer. OverloadedError: too many questions at a time.
        """
        if len(self._pending) >= MAX_QUESTIONS:
            raise OverloadedError("too many questions wait for the launcher; try again later")
        number = next(self._numbers)
        answer: asyncio.Future[TotalReply] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            self.say(TotalQuery(number, own_counts(pipeline.metrics.registry)))
            async with asyncio.timeout(SUM_S):
                return exposition(pipeline.metrics.registry, (await answer).counts)
        except TimeoutError:
            raise DeadlineError(f"the launcher did not answer within {SUM_S:.0f} s") from None
        finally:
            del self._pending[number]


@dataclass(frozen=True)
class WorkerSignals:
    """What a worker is told by signals.

    Attributes:
        leave: end when the requests in flight have; others go on. stop: end soon, all do.
    """

    leave: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)


async def run_worker(feed: socket.socket, listening: socket.socket, counters: int, signals: WorkerSignals) -> None:
    """Serve until it is told otherwise, or the parent has gone.

    Args:
        feed: connected to the parent's end; closed at the end. counters: descriptor of the shared counters' memory.

    Raises:
        FeedError: the parent says what no parent says.
    """
    reader, writer = await asyncio.open_unix_connection(sock=feed)
    try:
        parent = Feed(reader, writer)
        setup = await parent.setup()
        if setup is not None:
            await _serve(parent, setup, listening, SharedCounters(mmap.mmap(counters, 0), setup.rows, COUNTS), signals)
    except ExceptionGroup as failed:
        raise most_telling(failed) from None
    finally:
        writer.transport.abort()


async def _serve(
    parent: Feed, setup: Setup, listening: socket.socket, counters: SharedCounters, signals: WorkerSignals
) -> None:
    ledger = SharedLedger(counters, setup.row)
    table = InstanceTable(ledger=ledger, link_grace_s=setup.link_grace_s)
    background = Background()
    app = create_app(setup.settings, table, metrics_text=parent.metrics, background=background)
    shared = SharedListener(listening, lambda: counters.least_connections(setup.row))
    try:
        async with asyncio.TaskGroup() as group:

            def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
                return group.create_task(work)

            front = start(
                serve(
                    app,
                    "",
                    0,
                    shared=shared,
                    grace_s=max(setup.grace_s, setup.drain_s),
                    started=lambda: parent.say(Serving()),
                    background=background,
                )
            )
            leave, stop = start(signals.leave.wait()), start(signals.stop.wait())
            fed = start(parent.listen(WorkerRoster(table), app.state.pipeline))
            background.start(
                "notes on the board",
                lambda: _take_notes(table, ledger, lambda: counters.say_connections(setup.row, shared.connections)),
            )
            await asyncio.wait((front, leave, stop, fed), return_when=asyncio.FIRST_COMPLETED)
            front.cancel()  # it takes no more connections; what is in flight goes on, and so does the feed
            if leave.done():
                await asyncio.wait((front, stop, fed), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([front], timeout=setup.grace_s)
            front.cancel()
            for task in (leave, stop, fed):
                task.cancel()
    finally:
        await background.stop()


async def _take_notes(table: InstanceTable, ledger: SharedLedger, say_connections: Callable[[], None]) -> None:
    """What an instance reports is held against what had been acquired by then: by all workers, so all are watched."""
    moves = -1
    while True:
        say_connections()
        if moves != (moves := ledger.moves()):
            table.note_acquired()
        await asyncio.sleep(NOTE_S)
