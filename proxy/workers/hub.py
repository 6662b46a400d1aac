"""The parent's side of several proxy processes: tells them of the deployment, answers what they cannot know.

Owns the socket that they connect to, what is said there, and the counts of those that have ended. Leaves starting and
ending processes to `deploy/front`. It holds no client's connection: a worker that stops costs the others nothing but a
wait of `TELL_S` for whoever scrapes metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry

from epd_serve.errors import EpdError
from epd_serve.wire import Announcement
from proxy.background import Background
from proxy.config.keys import ApiKeys
from proxy.errors import most_telling
from proxy.page.observed import Observe
from proxy.records.records import Question, RecordsAnswer, merged
from proxy.registry.announcements import Announcements, take_in
from proxy.registry.stage_metrics import register_stage_metrics
from proxy.workers.metrics_aggregation import exposition, lasting, own_counts, summed
from proxy.workers.roster import ParentTable
from proxy.workers.wire import (
    CountsQuery,
    CountsReply,
    Family,
    FeedError,
    FromParent,
    Hello,
    Keys,
    RecordsQuery,
    RecordsReply,
    SeenQuery,
    SeenReply,
    Serving,
    Setup,
    TotalQuery,
    TotalReply,
    decoded,
    frame,
    from_worker,
    read_frame,
)

logger = logging.getLogger(__name__)
TELL_EVERY_S = 2.0
TELL_S = 1.0
HELLO_S = 5.0
HUNG_S = 30.0
MAX_QUESTIONS = 256
"""Questions of one worker that are answered at a time; it asks no more."""


async def _no_more() -> bytes:
    return b""


class Worker:
    """One life of one worker, as this end sees it. Made by `WorkerHub.expect`.

    Attributes:
        setup: what it is told at first.
        told: it has been told a roster, so it may go by an old one.
        serving: it has begun to take connections.
        parted: the feed has ended, and is not back.
        trouble: why it is not to be talked with any more, or "".
        changed: set when one of these has.
    """

    def __init__(self, row: int, setup: Setup) -> None:
        self.row = row
        self.setup = setup
        self.counts: list[Family] = []
        self.told = self.serving = self.parted = False
        self.trouble = ""
        self.changed = asyncio.Event()
        self.roster_is_old = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[CountsReply | RecordsReply]] = {}

    def send(self, message: FromParent) -> None:
        if self.writer is not None:
            with contextlib.suppress(ConnectionError):  # its end is noticed by who reads
                self.writer.write(frame(message))

    async def tell(self, timeout_s: float) -> bool:
        """Have it say what it has counted. False when it did not in time."""
        return await self._asked(CountsQuery(next(self._numbers)), timeout_s) is not None

    async def look(self, question: Question, timeout_s: float) -> RecordsAnswer | None:
        """What it knows of requests; None when it did not say in time."""
        reply = await self._asked(RecordsQuery(next(self._numbers), question), timeout_s)
        return reply.answer if isinstance(reply, RecordsReply) else None

    async def _asked(self, query: CountsQuery | RecordsQuery, timeout_s: float) -> CountsReply | RecordsReply | None:
        reply: asyncio.Future[CountsReply | RecordsReply] = asyncio.get_running_loop().create_future()
        self._pending[query.number] = reply
        self.send(query)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            return None
        finally:
            del self._pending[query.number]

    def reply(self, message: CountsReply | RecordsReply) -> None:
        if isinstance(message, CountsReply):
            self.counts = message.counts
        waiting = self._pending.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)


class WorkerHub:
    """Feeds of one set of workers. In the event loop of `table`, between `start` and `stop`.

    Args:
        feed: bound to the path that workers connect to; closed at the end.
        background: of this process; what is down in it the workers are told.
        key_file: of the deployment's key, where instances announce over TCP.
        api_keys: those of clients; None: nobody needs one.
        observe: answers what the pages of the workers show.
        more_metrics: Prometheus text of what is counted elsewhere; goes with every scrape.
    """

    def __init__(
        self,
        table: ParentTable,
        feed: socket.socket,
        background: Background,
        observe: Observe,
        key_file: str = "",
        more_metrics: Callable[[], Awaitable[bytes]] = _no_more,
        api_keys: ApiKeys | None = None,
    ) -> None:
        self._table = table
        self._feed = feed
        self._background = background
        self._observe = observe
        self._more_metrics = more_metrics
        self._api_keys = api_keys
        self._workers: dict[int, Worker] = {}
        self._attending: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._past: list[Family] = []
        self._ended = 0
        self._registry = CollectorRegistry()
        register_stage_metrics(self._registry, table)
        self._announcements = Announcements(table, self._on_announcement, background, key_file)
        table.on_change = background.changed = self._roster_changed

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._met, sock=self._feed)
        self._announcements.start()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._attending:
            task.cancel()
        if self._attending:
            await asyncio.wait(self._attending)
        await self._announcements.stop()

    def go_by(self, keys: ApiKeys) -> None:
        """From now on these are the clients' keys, for all workers that there are, and that come."""
        self._api_keys = keys
        for worker in self._workers.values():
            worker.send(Keys(keys))

    def expect(self, row: int, setup: Setup) -> Worker:
        """A worker is about to start, which counts in this row and is to be told `setup`."""
        assert row not in self._workers, f"row {row} has a worker"
        worker = self._workers[row] = Worker(row, setup)
        return worker

    def ended(self, worker: Worker) -> None:
        """It was collected. Its row may have another one."""
        del self._workers[worker.row]
        if worker.writer is not None:
            worker.writer.transport.abort()
        self._past = summed([self._past, lasting(worker.counts)])
        self._ended += 1

    def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._attend(reader, writer))
        self._attending.add(task)
        task.add_done_callback(self._attending.discard)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk with whoever has connected until its end of the feed closes."""
        worker: Worker | None = None
        try:
            async with asyncio.timeout(HELLO_S):
                raw = await read_frame(reader)
            hello = decoded(raw, from_worker) if raw is not None else None
            if not isinstance(hello, Hello) or hello.row not in self._workers:
                raise FeedError(f"nobody who is expected says {hello!r:.100}")
            worker = self._workers[hello.row]
            if worker.writer is not None:
                worker.writer.transport.abort()
            worker.writer = writer
            worker.parted = False
            await self._talk(worker, reader, writer)
        except (EpdError, TimeoutError) as error:
            if worker is not None and worker.writer is writer:
                worker.trouble = str(error)
            else:
                logger.warning("a connection to the feed is closed: %s", error)
        except Exception as error:
            logger.exception("talking with a proxy worker failed")
            if worker is not None:
                worker.trouble = str(error) or type(error).__name__
        finally:
            writer.transport.abort()
            if worker is not None and worker.writer is writer:
                worker.writer, worker.parted = None, True
                worker.changed.set()

    async def _talk(self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises FeedError: it says what no worker says. EpdError: it says nothing any more."""
        worker.send(worker.setup)
        if self._api_keys is not None:  # who comes again has the setup that it had, and may have missed this
            worker.send(Keys(self._api_keys))
        worker.roster_is_old.set()
        try:
            async with asyncio.TaskGroup() as group:
                sides = [group.create_task(self._inform(worker, writer)), group.create_task(self._watch(worker))]
                answers: set[asyncio.Task[None]] = set()
                while (raw := await read_frame(reader)) is not None:
                    match message := decoded(raw, from_worker):
                        case Serving():
                            worker.serving = True
                            worker.changed.set()
                        case CountsReply() | RecordsReply():
                            worker.reply(message)
                        case TotalQuery() | SeenQuery():
                            if len(answers) >= MAX_QUESTIONS:
                                raise FeedError("more questions at a time than a worker asks")
                            answers.add(task := group.create_task(self._answer(worker, message)))
                            task.add_done_callback(answers.discard)
                        case Hello():
                            raise FeedError("a second hello")
                for task in (*sides, *answers):
                    task.cancel()
        except ExceptionGroup as failed:
            raise most_telling(failed) from None

    async def _inform(self, worker: Worker, writer: asyncio.StreamWriter) -> None:
        """Only the latest roster is ever waiting to be sent."""
        while True:
            await worker.roster_is_old.wait()
            worker.roster_is_old.clear()
            if self._table.number:  # or nothing is known yet: what a worker goes by is better than nothing
                worker.told = True
                worker.send(self._table.roster(self._background.down))
                with contextlib.suppress(ConnectionError):
                    await writer.drain()

    async def _watch(self, worker: Worker) -> None:
        """Know its counts in case it dies, and that it lives."""
        while True:
            if not await worker.tell(HUNG_S):
                raise EpdError(f"no word for {HUNG_S:.0f} s")
            await asyncio.sleep(TELL_EVERY_S)

    async def metrics(self) -> bytes:
        """Prometheus text of all workers together, of the table, and of what is counted elsewhere."""
        counts, more = await asyncio.gather(self.counted(), self._more_metrics())
        return exposition(self._registry, counts) + more

    async def counted(self) -> list[Family]:
        """What all workers have counted together."""
        return await self._all_counted(None)

    async def look(self, question: Question) -> RecordsAnswer:
        """What all workers know of requests. One that does not answer in time is left out."""
        serving = [one for one in self._workers.values() if one.writer is not None]
        answers = await asyncio.gather(*(one.look(question, TELL_S) for one in serving))
        for worker, answer in zip(serving, answers, strict=True):
            for request in answer.requests if answer is not None else ():
                request["door"] = f"front.{worker.row}"
        return merged(question, [one for one in answers if one is not None])

    async def _answer(self, worker: Worker, question: TotalQuery | SeenQuery) -> None:
        with self._background.handling(type(question).__name__):  # who asked waits for its deadline, and nobody else
            if isinstance(question, SeenQuery):
                worker.send(SeenReply(question.number, await self._observe(question.question, question.whole)))
            else:
                worker.counts = question.counts
                counts, more = await asyncio.gather(self._all_counted(worker), self._more_metrics())
                worker.send(TotalReply(question.number, counts, more))

    async def _all_counted(self, asker: Worker | None) -> list[Family]:
        others = [one for one in self._workers.values() if one is not asker and one.serving]
        await asyncio.gather(*(one.tell(TELL_S) for one in others if one.writer is not None))
        serving = [asker, *others] if asker is not None else others
        mine = worker_metrics(len(serving), self._ended)
        return summed([self._past, *(worker.counts for worker in serving), own_counts(self._background.registry), mine])

    def _roster_changed(self) -> None:
        for worker in self._workers.values():
            worker.roster_is_old.set()

    def _on_announcement(self, message: Announcement) -> None:
        """The parent routes nothing, but says when all is ready, and knows which links are in use."""
        take_in(self._table, message)


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
