"""Takes connections from a listening socket that other processes take them from, too, and leaves them their part.

Whoever is woken first would take each connection while all are idle, so that connections which live long (streams, a
gateway's pool) would pile up in one process. So one that has more than the least busy other waits for `POLITE_S` before
it takes the next. Nobody is relied on: after that it takes it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Collection
from typing import Any

logger = logging.getLogger(__name__)
POLITE_S = 0.01
OUT_OF_FILES_S = 1.0


class SharedListener:
    """Takes connections between `start` and `stop`, in the running event loop.

    Args:
        listening: non-blocking; closed by `stop`.
        least: connections of the process that has fewest of the others, None where there is no other.
    """

    def __init__(self, listening: socket.socket, least: Callable[[], int | None]) -> None:
        self._listening = listening
        self._least = least
        self._protocol: Callable[[], asyncio.BaseProtocol] | None = None
        self._held: Collection[Any] = ()
        self._beginning: set[asyncio.Task[Any]] = set()
        self._later: asyncio.TimerHandle | None = None

    @property
    def takes(self) -> bool:
        """Whether it takes connections now."""
        return self._protocol is not None and self._listening.fileno() >= 0

    @property
    def connections(self) -> int:
        """How many connections this process has."""
        return len(self._held) + len(self._beginning)

    def start(self, protocol: Callable[[], asyncio.BaseProtocol], held: Collection[Any]) -> None:
        """Take connections.

        Args:
            protocol: makes the protocol of one. held: those that are open, kept by the protocols.
        """
        self._protocol, self._held = protocol, held
        self._look()

    def stop(self) -> None:
        """Take no more. Any number of times."""
        if self._later is not None:
            self._later.cancel()
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()

    def _look(self) -> None:
        asyncio.get_running_loop().add_reader(self._listening, self._ready)

    def _ready(self) -> None:
        least = self._least()
        if least is not None and self.connections > least:
            self._pause(POLITE_S)
        else:
            self._take()

    def _pause(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        self._later = loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._look()
        self._take()

    def _take(self) -> None:
        """One, so that others get the next while this process works for it."""
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # somebody else has it, or it has gone
        except OSError as error:
            if error.errno == errno.EINVAL:  # whoever has opened it has shut it down: nobody comes any more
                self.stop()
                return
            logger.error("no connection can be taken: %s", error)
            self._pause(OUT_OF_FILES_S)
            return
        accepted.setblocking(False)
        assert self._protocol is not None, "started"
        begin = asyncio.get_running_loop().connect_accepted_socket(self._protocol, accepted)
        task = asyncio.ensure_future(begin)
        self._beginning.add(task)
        task.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[Any]) -> None:
        self._beginning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("a connection ended before it began: %s", error)
