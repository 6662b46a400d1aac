"""Hears what other stages announce: one SUB socket on the addresses of those who are there. Belongs to one thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import zmq

from epd_serve import wire
from epd_serve.sockets import Following, open_socket, readable

logger = logging.getLogger(__name__)


class Subscription:
    """Deaf until told whom to follow.

    Args:
        key_file: of the deployment's key, where addresses may be TCP ports.
    """

    def __init__(self, key_file: str = "") -> None:
        self.socket = open_socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._following = Following(self.socket, key_file)

    def follow(self, endpoints: Iterable[str]) -> None:
        """From now on hear these, and nobody else."""
        self._following.follow(endpoints)

    def at_hand(self, timeout_s: float = 0.0) -> Iterator[wire.Announcement]:
        """All that is here, after waiting at most `timeout_s` for the first."""
        while readable(self.socket, timeout_s):
            timeout_s = 0.0
            try:
                yield wire.announcements.decode(self.socket.recv())
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed announcement: %s", error)

    def close(self) -> None:
        self.socket.close()
