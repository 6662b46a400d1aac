"""What a packet costs on one link, measured: probes when it opens, then every slice that moves.

Owns the line t = a + b·bytes (`epd_serve.kv.fit.LineFit`) and the lock around it: the link's thread observes, the model
runner's thread plans with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from epd_serve.engine.kv.transport import AwaitMessage, SendMessage, SendSide
from epd_serve.kv.fit import LineFit
from epd_serve.kv.grouping import LinkCost
from epd_serve.kv.slices import LARGEST_PROBE_BYTES

PROBE_BYTES = (64 << 10, 256 << 10, 1 << 20, LARGEST_PROBE_BYTES)
_ROUNDS = 2
# Before anything was measured: a socket's round trip and 1 GB/s.
_PRIOR = LinkCost(200e-6, 1e-9)


class MeasuredCost:
    """The cost of one link so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._fit = LineFit(_PRIOR.setup_s, _PRIOR.s_per_byte)

    def now(self) -> LinkCost:
        with self._lock:
            return LinkCost(self._fit.a, self._fit.b)

    def observe(self, nbytes: int, seconds: float) -> None:
        """One slice took so long."""
        with self._lock:
            self._fit.observe(nbytes, seconds)

    def probe(self, side: SendSide, send: SendMessage, receive: AwaitMessage) -> None:
        """Move bytes of no meaning and time them. The first move pays for what is set up once, so it does not count.

        Raises:
            LinkError: this transport does not carry bytes to this peer.
        """
        largest = side.largest_probe
        sizes = [size for size in PROBE_BYTES if size <= largest] or [largest]
        for index, nbytes in enumerate(size for size in sizes for _ in range(_ROUNDS)):
            began = self._clock()
            side.probe(nbytes, send, receive)
            if index:
                self.observe(nbytes, self._clock() - began)
