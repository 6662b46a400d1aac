"""Takes connections from a listening socket that other processes take them from, too, and leaves them their part.

Whoever is woken first would take each connection while all are idle, so that connections which live long (streams, a
gateway's pool) would pile up in one process. So one that has more than the least busy other waits for `POLITE_S` before
it takes the next. Nobody is relied on: after that it takes it. Until it has as many as that one it takes all that wait,
as it does where it is alone: a busy event loop comes round a few dozen times a second, and with one connection each
time, those who connect would wait for seconds.

Each connection is a file, and so is each to a stage. So a process has a bound on how many it takes: beyond that, those
who connect wait in the kernel, and connections on which nothing is asked make room for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import sys
from collections.abc import Callable, Collection
from typing import Any

from proxy.server.idle_clients import end_an_idle_one
from proxy.server.tls import HANDSHAKE_S, Certificate

logger = logging.getLogger(__name__)
POLITE_S = 0.01
AT_ONCE = 128
"""Connections that are taken before others in the event loop have their turn."""

OUT_OF_FILES_S = 1.0
FULL_S = 0.05
"""Until a process that has as many connections as it may looks whether one has ended."""

FILES_PER_CONNECTION = 4
"""Of a request: its client, prefill, decode; and one for encoders, media and whatever else is open."""


def most_connections() -> int:
    """How many one process may have, once it may open all the files that the system lets it."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems do not let it have what they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        files = most_files
    return sys.maxsize if files == resource.RLIM_INFINITY else max(1, files // FILES_PER_CONNECTION)


class SharedListener:
    """Takes connections between `start` and `stop`, in the running event loop.

    Args:
        listening: non-blocking; closed by `stop`.
        least: connections of the process that has fewest of the others, None where there is no other.
        certificate: of a port that talks TLS.
        most: connections that this process has at once.
    """

    def __init__(
        self,
        listening: socket.socket,
        least: Callable[[], int | None],
        certificate: Certificate | None = None,
        most: int = sys.maxsize,
    ) -> None:
        self._most = most
        self._certificate = certificate
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
        if self.connections >= self._most:
            others_have_room = least is not None and least < self._most
            if others_have_room or not end_an_idle_one(self._held):
                self._pause(FULL_S)
            return
        places = AT_ONCE if least is None else min(AT_ONCE, least + 1 - self.connections)
        if places < 1:
            self._pause(POLITE_S)
        else:
            self._take(places)

    def _pause(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        self._later = loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._look()
        self._take(1)

    def _take(self, most: int) -> None:
        """So many of those that wait, as far as there is room."""
        while most and self.connections < self._most and self._take_next():
            most -= 1

    def _take_next(self) -> bool:
        """Returns whether there was one, and there may be another."""
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # somebody else has it, or it has gone
        except OSError as error:
            if error.errno == errno.EINVAL:  # whoever has opened it has shut it down: nobody comes any more
                self.stop()
                return False
            logger.error("no connection can be taken: %s", error)
            self._pause(OUT_OF_FILES_S)
            return False
        accepted.setblocking(False)
        assert self._protocol is not None, "started"
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._certificate is not None:
            tls = {"ssl": self._certificate.context, "ssl_handshake_timeout": HANDSHAKE_S}
        task = asyncio.ensure_future(loop.connect_accepted_socket(self._protocol, accepted, **tls))
        self._beginning.add(task)
        task.add_done_callback(self._begun)
        return True

    def _begun(self, task: asyncio.Task[Any]) -> None:
        self._beginning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("a connection ended before it began: %s", error)
