"""Scheduler side of the device path: a source of features that lie in device memory of every worker.

Asks the feature agents (`device_fetch.py`) of all ranks and says READY when each of them has verified the feature; the
ledger (`device_ledger.py`) decides, this file moves messages. No tensor, no transport: it runs beside vLLM's scheduler.

Plugged in by `device_source.py` (calls that block) and `direct_source.py` (which of two ways). Encoders are met on
their first `StoreReport`, so that they have been probed when they announce their first feature.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from epd_serve import wire
from epd_serve.engine.ec.device_ledger import DevicePin, Failed, FetchLedger, Pinned
from epd_serve.engine.ec.device_probe import PairProbe, Path, Verdict
from epd_serve.engine.ec.device_slab import SlabBook
from epd_serve.engine.ec.device_tier import PROBE_BYTES, probe_key
from epd_serve.sockets import Socket, connect, milliseconds, open_socket, readable
from epd_serve.wake import WakeLine

logger = logging.getLogger(__name__)

_HELLO_EVERY_S = 0.2
_TICK_S = 0.02
_PROBE_PREFIX = probe_key("")


class DeviceFeatures:
    """Thread-safe; callbacks come from its own thread, which holds no lock then.

    Args:
        endpoints: of the agents, by rank. incarnation: of this instance. wait_s: deadline of one fetch.
        on_pinned: a fetched feature; the callee owns the pin.
        on_failed: key, cause and reason of a fetch that failed. Every `fetch` ends in one of the two.
        on_path: encoder's incarnation, path and reason, once each is decided.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        incarnation: str,
        wait_s: float,
        on_pinned: Callable[[DevicePin], None],
        on_failed: Callable[[str, str, str], None],
        on_path: Callable[[str, Path, str], None],
    ) -> None:
        assert endpoints
        self._incarnation = incarnation
        self._wait_s = wait_s
        self._on_pinned = on_pinned
        self._on_failed = on_failed
        self._on_path = on_path
        self._lock = threading.Lock()  # guards all state below
        self._ring_lock = threading.Lock()
        self._ledger: FetchLedger | None = None  # from when every agent is ready
        self._refused: list[Failed] = []
        self._verdicts: list[Verdict] = []
        self._probe = PairProbe()
        self._slabs: dict[int, int] = {}
        self._closing = False
        self._wake = WakeLine()
        self._thread = threading.Thread(
            target=self._run, args=(tuple(endpoints),), name="epd-device-features", daemon=True
        )
        self._thread.start()

    def try_local(self, key: str) -> DevicePin | None:
        """A pin of a feature that every worker has; None when it has to be fetched."""
        with self._lock:
            return self._ledger.try_local(key) if self._ledger is not None else None

    def fetch(self, key: str, nbytes: int = 0) -> None:
        """Brings a feature in; a callback follows. Joins a fetch of the same key. `nbytes` 0: unknown."""
        with self._lock:
            if self._ledger is not None and not self._probe.refusal:
                self._ledger.fetch(key, nbytes, time.monotonic())
            else:
                self._refused.append(Failed(key, "unavailable", self._probe.refusal or "workers are not ready"))
        self._ring()

    def meet(self, encoder: str) -> None:
        """An encoder's life was heard of: it is probed, unless it was."""
        with self._lock:
            if (verdict := self._probe.meet(encoder)) is not None:
                self._verdicts.append(verdict)
        self._ring()

    def path(self, encoder: str) -> Path:
        """How features come from this life of an encoder."""
        with self._lock:
            return self._probe.path(encoder)

    def pinned_bytes(self) -> int:
        """Of one worker's slab: what may not be evicted, fetches under way included."""
        with self._lock:
            return self._ledger.book.pinned_bytes if self._ledger is not None else 0

    def capacity_bytes(self) -> int:
        """Of one worker's slab; 0 until all are ready."""
        with self._lock:
            return self._ledger.book.capacity if self._ledger is not None else 0

    def close(self) -> None:
        self._closing = True
        self._ring()
        self._thread.join(timeout=5)

    def _unpin(self, pin: DevicePin) -> None:
        with self._lock:
            assert self._ledger is not None
            self._ledger.release(pin)

    def _ring(self) -> None:
        with self._ring_lock:
            self._wake.ring()

    # --- its thread -----------------------------------------------------------------------------------------------

    def _run(self, endpoints: tuple[str, ...]) -> None:
        agents = [open_socket(zmq.DEALER) for _ in endpoints]
        poller = zmq.Poller()
        poller.register(self._wake.listener, zmq.POLLIN)
        for agent, endpoint in zip(agents, endpoints, strict=True):
            connect(agent, endpoint)
            poller.register(agent, zmq.POLLIN)
        next_hello = 0.0
        while not self._closing:
            now = time.monotonic()
            if self._ledger is None and not self._probe.refusal and now >= next_hello:
                next_hello = now + _HELLO_EVERY_S
                self._say_hello(agents)
            self._poll(poller)
            for rank, agent in enumerate(agents):
                while readable(agent):
                    self._take(rank, agent.recv(), len(agents))
            self._advance(agents)
        for agent in agents:
            agent.close()

    def _poll(self, poller: zmq.Poller) -> None:
        with self._lock:
            ledger = self._ledger
            hurry = self._probe.probing() or (ledger is not None and ledger.busy())
        timeout_s = _HELLO_EVERY_S if ledger is None else _TICK_S if hurry else 1.0
        if self._wake.listener in dict(poller.poll(milliseconds(timeout_s))):
            self._wake.answer()

    def _say_hello(self, agents: list[Socket]) -> None:
        message = wire.encode(wire.AgentHello(wire.VERSION, self._incarnation))
        for rank, agent in enumerate(agents):
            if rank not in self._slabs:
                _send(agent, message)

    def _take(self, rank: int, raw: bytes, ranks: int) -> None:
        try:
            message = wire.to_feature_client.decode(raw)
        except wire.DecodeError as error:
            logger.warning("ignoring a malformed message of feature agent %d: %s", rank, error)
            return
        with self._lock:
            ledger = self._ledger
            if isinstance(message, wire.AgentReady):
                self._ready(rank, message, ranks)
            elif isinstance(message, wire.AgentRefused):
                self._verdicts.extend(self._probe.refuse(f"worker {rank}: {message.reason}"))
            elif ledger is None:
                logger.warning("feature agent %d answers what nobody asked", rank)
            elif isinstance(message, wire.Fetched):
                ledger.fetched(rank, message, time.monotonic())
            elif isinstance(message, wire.FetchFailed):
                ledger.failed(rank, message, time.monotonic())
            else:
                ledger.settled(rank, message)

    def _ready(self, rank: int, message: wire.AgentReady, ranks: int) -> None:
        self._slabs[rank] = message.slab_bytes
        if len(self._slabs) == ranks and self._ledger is None:
            book = SlabBook(min(self._slabs.values()))
            self._ledger = FetchLedger(book, ranks, self._wait_s, self._unpin)
            where = f"{book.capacity >> 20} MiB in each of {ranks} workers"
            logger.info("features go to device memory: %s, verified by %s", where, message.integrity)

    def _advance(self, agents: list[Socket]) -> None:
        now = time.monotonic()
        with self._lock:
            events: list[Pinned | Failed] = [*self._refused]
            self._refused.clear()
            outgoing: list[wire.FetchInto] = []
            if (ledger := self._ledger) is not None:
                for encoder in self._probe.due(now):
                    ledger.fetch(probe_key(encoder), PROBE_BYTES, now, writer=encoder)
                ledger.expire(now)
                events += ledger.events
                outgoing += ledger.outgoing
                ledger.events.clear()
                ledger.outgoing.clear()
            for event in events:
                if event.key.startswith(_PROBE_PREFIX):
                    self._probed(event, now)
            verdicts, self._verdicts = self._verdicts, []
        for message in outgoing:
            raw = wire.encode(message)
            for agent in agents:
                _send(agent, raw)
        for verdict in verdicts:
            self._report(verdict)
        for event in events:
            if event.key.startswith(_PROBE_PREFIX):
                continue
            if isinstance(event, Pinned):
                self._on_pinned(event.pin)
            else:
                self._on_failed(event.key, event.cause, event.reason)

    def _probed(self, event: Pinned | Failed, now: float) -> None:
        """Under the lock."""
        assert self._ledger is not None
        failure = ""
        if isinstance(event, Pinned):
            self._ledger.release(event.pin)
            self._ledger.book.forget(event.pin.key)  # the slab is for features
        else:
            failure = f"{event.cause}: {event.reason}"
        verdict = self._probe.tried(event.key.removeprefix(_PROBE_PREFIX), failure, now)
        if verdict is not None:
            self._verdicts.append(verdict)

    def _report(self, verdict: Verdict) -> None:
        if verdict.path is Path.DEVICE:
            logger.info("features of encoder %s come from device to device", verdict.encoder)
        else:
            logger.warning("features of encoder %s come through the arena: %s", verdict.encoder, verdict.reason)
        self._on_path(verdict.encoder, verdict.path, verdict.reason)


def _send(agent: Socket, raw: bytes) -> None:
    try:
        agent.send(raw, zmq.NOBLOCK)
    except zmq.Again:  # a thousand messages behind: the attempt's deadline tells
        logger.warning("a feature agent does not read its messages")
