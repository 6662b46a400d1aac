"""Listens to what every stage announces (`epd_serve.wire.Announcement`), wherever the status table says they do, and
puts it where it is needed: features into the directory, reports into the status table, causes to the requests that
failed of them.

An address is connected while an instance of the table names it, once however many share it. Announcements are hints: a
lost or late one costs time, never truth.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.errors import ConfigError
from epd_serve.sockets import connect
from proxy.background import Background
from proxy.metrics import Metrics
from proxy.registry.feature_directory import FeatureDirectory
from proxy.registry.table import InstanceTable

logger = logging.getLogger(__name__)
RELOOK_S = 60.0
OPTIONS = {
    zmq.LINGER: 0,
    zmq.RCVHWM: 20_000,  # messages that may wait; more of them are dropped, never the sender held up
    zmq.MAXMSGSIZE: 1 << 20,  # whoever sends more loses the connection, which comes back
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.HEARTBEAT_IVL: 5_000,  # ms: a host that vanished is connected to again
}
TASK = "announcements"
MALFORMED = "malformed"
"""The kind of a message that does not decode."""

MISSING_WAIT_S = 0.05
MISSING_LIMIT = 1024
_OUR_ID = re.compile(r"[0-9a-f]{32}")


class Announcements:
    """The subscription. Runs between `start` and `stop`. Without an address it holds no socket.

    Args:
        handler: called with every message, in order. One that it fails on, or that does not decode, is skipped.
        background: what runs it.
        key_file: of the deployment's key, where instances announce over TCP.
    """

    def __init__(
        self,
        table: InstanceTable,
        handler: Callable[[wire.Announcement], object],
        background: Background,
        key_file: str = "",
    ) -> None:
        self._table = table
        self._handler = handler
        self._background = background
        self._key_file = key_file
        self._connected: set[str] = set()
        self._refused: set[str] = set()
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def listening(self) -> bool:
        """Whether anybody is heard who announces something about features, such as that one is missing."""
        return bool(self._connected & self._table.event_addresses())

    def ask_whole(self, instance: str) -> None:
        """Have an instance tell all that it has cached, because something that it said was not heard."""
        if self._socket is not None:  # subscribing is all that a subscriber can say
            topic = wire.WHOLE_TOPIC + instance.encode()
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic)

    def start(self) -> None:
        self._background.start(TASK, self._run)

    async def stop(self) -> None:
        """End, and close the socket. Harmless when never started."""
        await self._background.stop(TASK)

    async def _run(self) -> None:
        while not self._table.announcement_addresses():
            await self._table.changed(RELOOK_S)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            for option, value in OPTIONS.items():
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._socket = socket
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow(socket))
                    group.create_task(self._receive(socket))
            finally:
                self._socket = None
                self._connected.clear()

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        """Keep the connections equal to the addresses of the table. One that is refused is tried again at the next
        change."""
        while True:
            addresses = self._table.announcement_addresses()
            self._refused &= addresses
            for address in sorted(addresses - self._connected):
                try:
                    connect(socket, address, self._key_file)
                    self._connected.add(address)
                except (zmq.ZMQError, ConfigError) as error:
                    if address not in self._refused:
                        logger.error("announcements at %s cannot be subscribed to: %s", address, error)
                    self._refused.add(address)
            for address in sorted(self._connected - addresses):
                socket.disconnect(address)
                self._connected.discard(address)
            self._refused -= self._connected
            await self._table.changed(RELOOK_S)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            message: wire.Announcement | None = None
            with self._background.handling(MALFORMED):  # more than DecodeError: bytes can be nested too deeply, too
                message = wire.announcements.decode(frames[-1])
            if message is not None:
                with self._background.handling(type(message).__name__):
                    self._handler(message)


class MissingFeatures:
    """Why requests failed for want of a feature: announced causes by the proxy's id of the request.

    A consumer announces `FeatureMissing` before it fails the request, but on another connection: the failure may be
    here first. Lives in one event loop.

    Args:
        limit: the oldest goes when more are kept.
    """

    def __init__(self, limit: int = MISSING_LIMIT) -> None:
        self._limit = limit
        self._causes: dict[str, asyncio.Future[wire.FeatureMissing]] = {}

    def announced(self, event: wire.FeatureMissing) -> None:
        """Keep what a consumer said. Stages lengthen the id that we gave them; ours is still in it."""
        match = _OUR_ID.search(event.request_id)
        ours = match.group() if match else event.request_id
        cause = self._causes.pop(ours, None)
        if cause is None or cause.done():
            cause = asyncio.get_running_loop().create_future()
        cause.set_result(event)
        self._causes[ours] = cause
        if len(self._causes) > self._limit:
            del self._causes[next(iter(self._causes))]

    async def of(self, request_id: str, *, timeout_s: float) -> wire.FeatureMissing | None:
        """What was announced for this request, now or within `timeout_s`. Each announcement is given out once."""
        cause = self._causes.setdefault(request_id, asyncio.get_running_loop().create_future())
        try:
            await asyncio.wait([cause], timeout=timeout_s)
        finally:
            self._causes.pop(request_id, None)
        return cause.result() if cause.done() else None


class AnnouncementDispatcher(Announcements):
    """Takes in everything that reaches this proxy without having been asked for. Owns none of it being true:
    announcements get lost. `key_file`: as of `Announcements`."""

    def __init__(
        self,
        table: InstanceTable,
        directory: FeatureDirectory,
        metrics: Metrics,
        background: Background,
        key_file: str = "",
    ) -> None:
        self.directory = directory
        self._metrics = metrics
        self._missing = MissingFeatures()
        super().__init__(table, self.dispatch, background, key_file)

    def dispatch(self, message: wire.Announcement) -> None:
        """Take in one announcement."""
        self._metrics.announcements.labels(type(message).__name__).inc()
        match message:
            case wire.FeatureExpected():
                self.directory.expected(message, time.monotonic())
            case wire.FeatureMade():
                return  # between stages
            case wire.FeatureReady():
                self._metrics.encoded_once.announced(message.key, time.monotonic())
                self.directory.announced(message, time.monotonic())
            case wire.FeaturePending():
                self.directory.renewed(message.keys, time.monotonic())
            case wire.FeatureFailed():
                self._metrics.encoded_once.lost([message.key])
                self.directory.lost([message.key])
            case wire.FeatureMissing():
                self._metrics.encoded_once.lost(message.keys)
                self.directory.lost(message.keys)
                self._missing.announced(message)
            case _:
                if self._table.report(message):
                    self.ask_whole(message.instance)

    async def missing_for(self, request_id: str) -> wire.FeatureMissing | None:
        """What a consumer said about a request that has just failed. It may be a moment behind the failure."""
        return await self._missing.of(request_id, timeout_s=MISSING_WAIT_S if self.listening else 0.0)
