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
from proxy.table import InstanceTable

logger = logging.getLogger(__name__)
RELOOK_S = 60.0
QUEUE = 20_000  # messages that may wait; the oldest subscriber is dropped from beyond it, never the sender held up
HEARTBEAT_MS = 5_000


class Announcements:
    """Runs between `start` and `stop`. Without an address it holds no socket.

    Args:
        heard: called with every message, in order. malformed: called for every one that does not decode.
    """

    def __init__(
        self, table: InstanceTable, heard: Callable[[wire.Announcement], None], malformed: Callable[[], None]
    ) -> None:
        self._table = table
        self._heard = heard
        self._malformed = malformed
        self._connected: set[str] = set()
        self._refused: set[str] = set()
        self._complained = False
        self._task: asyncio.Task[None] | None = None

    @property
    def listening(self) -> bool:
        """Whether anybody who announces something about features is heard."""
        return bool(self._connected & self._table.event_addresses())

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="announcements")
        self._task.add_done_callback(_say_why)

    async def stop(self) -> None:
        """End, and close the socket. Harmless when never started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while not self._table.news_addresses():
            await self._table.changed(RELOOK_S)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, QUEUE)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)  # a host that vanished is connected to again
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow(socket))
                    group.create_task(self._receive(socket))
            finally:
                self._connected.clear()

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        """Keep the connections equal to the addresses of the table."""
        while True:
            wanted = self._table.news_addresses()
            for address in sorted(wanted - self._connected - self._refused):
                self._connect(socket, address)
            for address in sorted(self._connected - wanted):
                socket.disconnect(address)
                self._connected.discard(address)
            await self._table.changed(RELOOK_S)

    def _connect(self, socket: zmq.asyncio.Socket, address: str) -> None:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            logger.error("announcements at %s cannot be subscribed to: %s", address, error)
            self._refused.add(address)
        else:
            self._connected.add(address)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                message = wire.announcements.decode(frames[-1])
            except wire.DecodeError as error:
                self._malformed()
                if not self._complained:
                    logger.warning("ignoring a malformed announcement, and not saying so again: %s", error)
                self._complained = True
            else:
                self._heard(message)


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("announcements are not heard any more", exc_info=error)
