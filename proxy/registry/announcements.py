"""Listens to what every stage announces (`epd_serve.wire.Announcement`), wherever the status table says they do.

Owns the subscription: an address is connected while an instance of the table names it, once however many share it.
What a message means is the handler's business. Announcements are hints: a lost or late one costs time, never truth.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.errors import ConfigError
from epd_serve.sockets import connect
from proxy.background import Background
from proxy.registry.table import InstanceTable

logger = logging.getLogger(__name__)
RELOOK_S = 60.0
QUEUE = 20_000  # messages that may wait; the oldest subscriber is dropped from beyond it, never the sender held up
HEARTBEAT_MS = 5_000
MAX_MESSAGE_BYTES = 1 << 20  # whoever sends more loses the connection, which comes back
TASK = "announcements"
MALFORMED = "malformed"
"""The kind of a message that does not decode."""


class Announcements:
    """Runs between `start` and `stop`. Without an address it holds no socket.

    Args:
        handler: called with every message, in order. One that it fails on, or that does not decode, is skipped.
        background: what runs it.
        key_file: of the deployment's key, where instances announce over TCP.
    """

    def __init__(
        self,
        table: InstanceTable,
        handler: Callable[[wire.Announcement], None],
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
        """Whether anybody who announces something about features is heard."""
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
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, QUEUE)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)  # a host that vanished is connected to again
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
                self._connect(socket, address)
            for address in sorted(self._connected - addresses):
                socket.disconnect(address)
                self._connected.discard(address)
            await self._table.changed(RELOOK_S)

    def _connect(self, socket: zmq.asyncio.Socket, address: str) -> None:
        try:
            connect(socket, address, self._key_file)
        except (zmq.ZMQError, ConfigError) as error:
            if address not in self._refused:
                logger.error("announcements at %s cannot be subscribed to: %s", address, error)
            self._refused.add(address)
        else:
            self._refused.discard(address)
            self._connected.add(address)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            message: wire.Announcement | None = None
            with self._background.handling(MALFORMED):  # more than DecodeError: bytes can be nested too deeply, too
                message = wire.announcements.decode(frames[-1])
            if message is not None:
                with self._background.handling(type(message).__name__):
                    self._handler(message)


def take_in(table: InstanceTable, message: wire.Announcement) -> None:
    """Note in the table what an instance says of itself: for those who route nothing, but say what is ready."""
    match message:
        case wire.StoreReport():
            table.report(message)
        case wire.KvReport():
            table.report_kv(message)
        case wire.StageReport():
            table.report_stage(message)
        case wire.CacheReport():
            table.report_cache(message)
        case _:
            pass
