"""What stages on the same device report of their steps, for an encoder that makes room for them.

Belongs to the scheduler's thread, which has nothing to wait for here: what has come is looked at before a step.
"""

from __future__ import annotations

import logging
import time

import zmq

from epd_serve import wire
from epd_serve.peers import Peers
from epd_serve.sockets import Following, open_socket, readable
from epd_serve.wiring import StageWiring

logger = logging.getLogger(__name__)

SILENT_S = 5.0
"""After which one that has reported counts as gone; a stage reports twice a second."""


class Neighbours:
    """Those who decode on a device of this stage, as they come and go."""

    def __init__(self, wiring: StageWiring) -> None:
        self._peers = Peers(wiring)
        self._ear = open_socket(zmq.SUB)
        self._following = Following(self._ear, wiring.key_file)
        self._topics: frozenset[bytes] = frozenset()
        self._heard_at = -SILENT_S

    def decode_step_s(self) -> float | None:
        """The longest mean step with decodes that one of them has reported since the last call; None: no news. 0 where
        there is none, or none that reports."""
        if self._peers.changed():
            self._follow()
        news: dict[str, float] = {}
        while self._topics and readable(self._ear):
            try:
                report = wire.announcements.decode(self._ear.recv())
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed report: %s", error)
                continue
            if isinstance(report, wire.StageReport):
                news[report.instance] = report.decode_step_s
        now = time.monotonic()
        if news:
            self._heard_at = now
            return max(news.values())
        return None if self._topics and now < self._heard_at + SILENT_S else 0.0

    def close(self) -> None:
        self._ear.close()

    def _follow(self) -> None:
        beside = self._peers.decoders_beside()
        topics = frozenset(map(wire.report_topic, beside))
        for topic in topics - self._topics:
            self._ear.setsockopt(zmq.SUBSCRIBE, topic)  # all else that they announce, their cache, stays with them
        for topic in self._topics - topics:
            self._ear.setsockopt(zmq.UNSUBSCRIBE, topic)
        self._topics = topics
        self._following.follow(beside.values())
