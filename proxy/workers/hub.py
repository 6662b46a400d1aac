"""The parent's side of several proxy processes: tells them which instances there are, answers what they cannot know.

Owns what is said over the feeds, and the counts of workers that have ended. Leaves starting and ending processes to
`deploy/launch`. It holds no client's connection: a worker that stops costs the others nothing but a wait of
`TELL_S` for whoever scrapes metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry

from epd_serve.errors import EpdError
from epd_serve.wire import Announcement, KvReport, StageReport, StoreReport
from proxy.background import Background
from proxy.errors import most_telling
from proxy.registry.announcements import Announcements
from proxy.registry.stage_metrics import register_stage_metrics
from proxy.workers.metrics_aggregation import exposition, lasting, own_counts, summed
from proxy.workers.roster import ParentTable
from proxy.workers.wire import (
    CountsQuery,
    CountsReply,
    Drain,
    Family,
    FeedError,
    FromParent,
    Leave,
    Roster,
    Running,
    Serving,
    Setup,
    TotalQuery,
    TotalReply,
    decoded,
    frame,
    from_worker,
    read_frame,
)

TELL_EVERY_S = 2.0
TELL_S = 1.0
HUNG_S = 30.0
MAX_QUESTIONS = 256
"""Questions of one worker that are answered at a time; it asks no more."""


class WorkerHungError(EpdError):
    """A worker has not answered for `HUNG_S`."""


class _Worker:
    """One run of one worker, as this end sees it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.counts: list[Family] = []
        self.running = 0
        self.drained = False
        self.roster_is_old = asyncio.Event()
        self.begun = asyncio.Event()
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[None]] = {}

    def send(self, message: FromParent) -> None:
        with contextlib.suppress(ConnectionError):  # its end is noticed by who reads
            self.writer.write(frame(message))

    async def tell(self, timeout_s: float) -> bool:
        """Have it say what it has counted. False when it did not in time."""
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._pending[number] = reply
        self.send(CountsQuery(number))
        try:
            async with asyncio.timeout(timeout_s):
                await reply
        except TimeoutError:
            return False
        finally:
            del self._pending[number]
        return True

    def reply(self, message: CountsReply) -> None:
        self.counts, self.running = message.counts, message.running
        waiting = self._pending.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class WorkerHub:
    """Feeds of one set of workers. In the event loop of `table`, between `start` and `stop`.

    Args:
        setup: what every worker is told first, but for its row.
        background: of this process; what is down in it the workers are told.
    """

    def __init__(self, table: ParentTable, setup: Setup, background: Background) -> None:
        self._table = table
        self._background = background
        self._setup = setup
        self._workers: set[_Worker] = set()
        self._past: list[Family] = []
        self._ended = 0
        self._leaving = self._draining = False
        self._drained = asyncio.Event()
        self._registry = CollectorRegistry()
        register_stage_metrics(self._registry, table)
        self._announcements = Announcements(table, self._on_announcement, background)
        table.on_change = background.changed = self._roster_changed

    def start(self) -> None:
        self._announcements.start()

    async def stop(self) -> None:
        await self._announcements.stop()

    @property
    def serving(self) -> int:
        """Workers that are there."""
        return len(self._workers)

    # Draining, as `proxy/admission/drain.py` does it where there is one process.

    @property
    def running(self) -> int:
        """Requests in flight, as far as it has been said."""
        return sum(worker.running for worker in self._workers)

    def announce(self) -> None:
        """Have all workers be ready no more, and go on serving."""
        self._leaving = True
        for worker in self._workers:
            worker.send(Leave())

    def begin(self) -> None:
        """Have all workers take on nothing more."""
        self._draining = True
        for worker in self._workers:
            worker.send(Drain())
        self._look_for_drained()

    async def idle(self) -> None:
        """Wait until every worker has said that nothing is left; whoever waits sets the deadline."""
        await self._drained.wait()

    def _look_for_drained(self) -> None:
        if self._draining and all(worker.drained for worker in self._workers):
            self._drained.set()

    async def attend(self, row: int, feed: socket.socket, serving: Callable[[], None]) -> None:
        """Talk with one run of one worker until its end of the feed closes. `feed` is closed at the end.

        Args:
            serving: called once it takes connections.

        Raises:
            WorkerHungError. FeedError: it says what no worker says.
        """
        reader, writer = await asyncio.open_unix_connection(sock=feed)
        worker = _Worker(writer)
        worker.send(msgspec.structs.replace(self._setup, row=row))
        worker.roster_is_old.set()
        if self._leaving:
            worker.send(Leave())
        if self._draining:
            worker.send(Drain())
        self._workers.add(worker)
        try:
            async with asyncio.TaskGroup() as group:
                sides = [group.create_task(self._inform(worker)), group.create_task(self._watch(worker))]
                answers: set[asyncio.Task[None]] = set()
                while (raw := await read_frame(reader)) is not None:
                    message = decoded(raw, from_worker)
                    match message:
                        case Serving():
                            worker.begun.set()
                            serving()
                        case CountsReply():
                            worker.reply(message)
                        case Running():
                            worker.running, worker.drained = message.running, message.running == 0
                            self._look_for_drained()
                        case TotalQuery():
                            if len(answers) >= MAX_QUESTIONS:
                                raise FeedError("more questions at a time than a worker asks")
                            answers.add(task := group.create_task(self._answer(worker, message)))
                            task.add_done_callback(answers.discard)
                for task in (*sides, *answers):
                    task.cancel()
        except ExceptionGroup as failed:
            raise most_telling(failed) from None
        finally:
            self._workers.discard(worker)
            self._look_for_drained()
            self._past = summed([self._past, lasting(worker.counts)])
            self._ended += 1
            writer.transport.abort()

    async def _inform(self, worker: _Worker) -> None:
        """Only the latest roster is ever waiting to be sent."""
        while True:
            await worker.roster_is_old.wait()
            worker.roster_is_old.clear()
            worker.send(Roster(self._table.rows(), self._background.down))
            with contextlib.suppress(ConnectionError):
                await worker.writer.drain()

    async def _watch(self, worker: _Worker) -> None:
        """Know its counts in case it dies, and that it lives."""
        await worker.begun.wait()
        while True:
            if not await worker.tell(HUNG_S):
                raise WorkerHungError(f"no word for {HUNG_S:.0f} s")
            await asyncio.sleep(TELL_EVERY_S)

    async def metrics(self) -> bytes:
        """Prometheus text of all workers together, and of the table."""
        return exposition(self._registry, await self._all_counted(None))

    async def _answer(self, worker: _Worker, question: TotalQuery) -> None:
        with self._background.handling(TotalQuery.__name__):  # who asked waits for its deadline, and nobody else
            worker.counts = question.counts
            worker.send(TotalReply(question.number, await self._all_counted(worker)))

    async def _all_counted(self, asker: _Worker | None) -> list[Family]:
        others = [worker for worker in self._workers if worker is not asker and worker.begun.is_set()]
        await asyncio.gather(*(worker.tell(TELL_S) for worker in others))
        serving = [asker, *others] if asker is not None else others
        mine = worker_metrics(len(serving), self._ended)
        return summed([self._past, *(worker.counts for worker in serving), own_counts(self._background.registry), mine])

    def _roster_changed(self) -> None:
        for worker in self._workers:
            worker.roster_is_old.set()

    def _on_announcement(self, message: Announcement) -> None:
        """The parent routes nothing, but says when all is ready, and knows which links are in use."""
        match message:
            case StoreReport():
                self._table.report(message)
            case KvReport():
                self._table.report_kv(message)
            case StageReport():
                self._table.report_stage(message)
            case _:
                pass


def worker_metrics(serving: int, ended: int) -> list[Family]:
    """Returns what only the parent can count: how many processes take connections, and how many have ended."""
    return [
        Family(
            "epd_proxy_workers",
            "gauge",
            "Proxy processes that take connections.",
            [("epd_proxy_workers", (), serving)],
        ),
        Family(
            "epd_proxy_workers_ended",
            "counter",
            "Proxy processes that have ended and were followed by another.",
            [("epd_proxy_workers_ended_total", (), ended)],
        ),
    ]
