"""Feeds several proxy processes: tells them of the deployment, answers what they cannot know, adds up what they count.

An HTTP server on a socket in the run directory: `GET /watch` of a worker is answered with everything, once that is
another than what the worker knows, or with nothing after a while; `GET /metrics` and `POST /seen` are answered for all
workers together.
What a worker has counted and knows of requests it is asked on a socket of its own (`worker.py`). Leaves starting and
ending processes to `deploy/front`. It holds no client's connection: a worker that stops costs the others nothing but a
wait of `TELL_S` for whoever scrapes metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.background import Background
from proxy.config.keys import ApiKeys
from proxy.page.events import Observe
from proxy.records.records import Question, RecordsAnswer, merged, unanswered
from proxy.registry.announcements import Announcements
from proxy.registry.stage_metrics import register_stage_metrics
from proxy.registry.table import InstanceTable
from proxy.server.uvicorn_server import serve
from proxy.workers.ask import TooLargeError, ask
from proxy.workers.metrics_aggregation import exposition, lasting, own_counts, summed
from proxy.workers.roster import Publisher
from proxy.workers.wire import NO_KEYS, WATCH_S, Family, Setup, Told, packed

TELL_EVERY_S = 2.0
TELL_S = 1.0
MAX_ANSWER_BYTES = 16 << 20

T = TypeVar("T")


async def _no_more() -> bytes:
    return b""


class Worker:
    """One life of one worker, as this end sees it. Made by `WorkerHub.expect`.

    Attributes:
        setup: what it is told at first. url: where it is asked.
        told: it has been told a roster, so it may go by an old one.
        serving: it takes connections.
        counts: what it had counted when it said so last.
    """

    def __init__(self, row: int, url: str, setup: Setup) -> None:
        self.row = row
        self.url = url
        self.setup = setup
        self.counts: list[Family] = []
        self.told = self.serving = False

    async def tell(self) -> None:
        """Have it say what it has counted; where it does not in time, `counts` stay as they were."""
        told = await self._asked("/counts", list[Family])
        if told is not None:
            self.counts = told

    async def look(self, question: Question) -> RecordsAnswer:
        """What it knows of requests; `unanswered` when it did not say in time."""
        told = await self._asked("/records", RecordsAnswer, msgspec.msgpack.encode(question))
        return told if told is not None else unanswered(question, 1)

    async def _asked(self, path: str, kind: type[T], body: bytes | None = None) -> T | None:
        try:
            told = await ask(self.url, path, body=body, within_s=TELL_S, most_bytes=MAX_ANSWER_BYTES)
            return msgspec.msgpack.decode(told, type=kind)
        except (OSError, TimeoutError, TooLargeError, msgspec.DecodeError):
            return None


class WorkerHub:
    """Of one set of workers. In the event loop of `table`, between `start` and `stop`.

    Args:
        published: what they are told.
        feed: bound to the path that workers connect to; closed at the end.
        background: of this process; what is down in it the workers are told.
        observe: answers what the pages of the workers show.
        key_file: of the deployment's key, where instances announce over TCP.
        more_metrics: Prometheus text of what is counted elsewhere; goes with every scrape.
        api_keys: those of clients; None: nobody needs one.
    """

    def __init__(
        self,
        table: InstanceTable,
        published: Publisher,
        feed: socket.socket,
        background: Background,
        observe: Observe,
        key_file: str = "",
        more_metrics: Callable[[], Awaitable[bytes]] = _no_more,
        api_keys: ApiKeys | None = None,
    ) -> None:
        self._published = published
        self._feed = feed
        self._background = background
        self._observe = observe
        self._more_metrics = more_metrics
        self._keys = NO_KEYS if api_keys is None else msgspec.Raw(packed(api_keys))
        self._workers: dict[int, Worker] = {}
        self._number = time.monotonic_ns()  # of what is told; later lives have larger numbers
        self._news = asyncio.Event()
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self._past: list[Family] = []
        self._ended = 0
        self._registry = CollectorRegistry()
        register_stage_metrics(self._registry, table)
        # This process routes nothing, but says when all is ready, and knows which links are in use.
        self._announcements = Announcements(table, table.report, background, key_file)
        published.on_change = background.changed = self._changed

    async def start(self) -> None:
        routes = [
            Route("/setup", self._on_setup),
            Route("/watch", self._on_watch),
            Route("/metrics", self._on_metrics),
            Route("/seen", self._on_seen, methods=["POST"]),
        ]
        serving = serve(Starlette(routes=routes), sockets=[self._feed], ends=self._end_watches)
        self._tasks = [asyncio.create_task(serving), asyncio.create_task(self._keep_counts())]
        self._announcements.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._announcements.stop()

    def go_by(self, keys: ApiKeys) -> None:
        """From now on these are the clients' keys, for all workers that there are, and that come."""
        raw = msgspec.Raw(packed(keys))
        if raw != self._keys:
            self._keys = raw
            self._changed()

    def expect(self, row: int, url: str, setup: Setup) -> Worker:
        """A worker is about to start, which counts in this row, is asked there and is to be told `setup`."""
        assert row not in self._workers, f"row {row} has a worker"
        worker = self._workers[row] = Worker(row, url, setup)
        return worker

    def ended(self, worker: Worker) -> None:
        """It was collected. Its row may have another one."""
        del self._workers[worker.row]
        self._past = summed([self._past, lasting(worker.counts)])
        self._ended += 1

    # --- what workers ask ----------------------------------------------------------------------------------------

    async def _on_setup(self, request: Request) -> Response:
        worker = self._asking(request)
        return Response(packed(worker.setup)) if worker is not None else Response(status_code=404)

    async def _on_watch(self, request: Request) -> Response:
        """Whoever asks late, or takes long to, is told the latest only."""
        if (worker := self._asking(request)) is None:
            return Response(status_code=404)
        after, roster = int(request.query_params["after"]), None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                while self._number == after and not self._ending:
                    await self._news.wait()
        if self._ending:
            return Response(status_code=503)
        if self._number == after:
            return Response()
        if self._published.number:
            worker.told = True
            roster = self._published.roster(self._background.down)
        return Response(packed(Told(self._number, roster, self._keys)))

    def _asking(self, request: Request) -> Worker | None:
        return self._workers.get(int(request.query_params["row"]))

    async def _on_metrics(self, request: Request) -> Response:
        return Response(await self.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def _on_seen(self, request: Request) -> Response:
        question, whole = msgspec.msgpack.decode(await request.body(), type=tuple[Question, bool])
        return Response(msgspec.msgpack.encode(await self._observe(question, whole)))

    def _changed(self) -> None:
        self._number += 1
        self._news.set()
        self._news = asyncio.Event()

    def _end_watches(self) -> None:
        self._ending = True
        self._changed()

    # --- what all of them know -----------------------------------------------------------------------------------

    async def metrics(self) -> bytes:
        """Prometheus text of all workers together, of the table, and of what is counted elsewhere."""
        counts, more = await asyncio.gather(self.counted(), self._more_metrics())
        return exposition(self._registry, counts) + more

    async def counted(self) -> list[Family]:
        """What all workers have counted together."""
        serving = self._serving
        await asyncio.gather(*(one.tell() for one in serving))
        mine = worker_metrics(len(serving), self._ended)
        return summed([self._past, *(one.counts for one in serving), own_counts(self._background.registry), mine])

    async def look(self, question: Question) -> RecordsAnswer:
        """What all workers know of requests. One that does not answer in time is left out, which counts say."""
        serving = self._serving
        answers = await asyncio.gather(*(one.look(question) for one in serving))
        for worker, answer in zip(serving, answers, strict=True):
            for request in answer.requests:
                request["door"] = f"front.{worker.row}"
        return merged(question, answers)

    @property
    def _serving(self) -> Sequence[Worker]:
        return [one for one in self._workers.values() if one.serving]

    async def _keep_counts(self) -> None:
        """Know what each has counted, in case it dies."""
        while True:
            await asyncio.gather(*(one.tell() for one in self._serving))
            await asyncio.sleep(TELL_EVERY_S)


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
