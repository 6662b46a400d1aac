"""P of a simulated layout: features looked up in the arena, verified and pinned before their request may run.

A feature is looked up on arrival of its request, on its event, and once more before it is given up. E's renewals put
that off. A lost one is recomputed from the media, a few requests at a time, or fails the request where it must
(`wire.ON_MISSING_XARG`, or no media). Announced features of other hosts are fetched by making their bytes here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.peers import Peers
from epd_serve.sim.items import DTYPE, Item, belongs_to, feature_bytes, feature_shape
from epd_serve.sim.publishing import Publisher, RateLimitedPublisher, store_report
from epd_serve.sockets import Following
from epd_serve.wiring import StageWiring
from store.arena import Arena, Lease
from store.errors import CorruptFeatureError, StoreError
from store.keys import whole_of

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_REMEMBERED = 4096  # announced features of other hosts


@dataclass(eq=False)
class Wait:
    """One request that needs features.

    Attributes:
        request: its id, which announcements name. must_not_recompute: a lost feature fails it.
        ready: called once with the items that have to be encoded here. failed: called once instead, with the reason.
    """

    request: str
    items: Sequence[Item]
    must_not_recompute: bool
    ready: Callable[[list[Item]], None]
    failed: Callable[[str], None]
    until: dict[str, float] = field(default_factory=dict)  # by key that is looked for
    lost: dict[str, str] = field(default_factory=dict)  # key → cause
    pins: dict[str, Lease] = field(default_factory=dict)
    recomputes: bool = False
    over: bool = False


class Consumer:
    """Runs between `start` and `close`. `counters` are as a real consumer's."""

    def __init__(self, wiring: StageWiring, store: Arena, publisher: Publisher, bytes_per_token: int) -> None:
        self._wiring, self._store, self._publisher = wiring, store, publisher
        self._bytes_per_token = bytes_per_token
        self._waits: dict[Wait, None] = {}
        self._recompute_queue: deque[Wait] = deque()  # lost features, no slot to recompute them yet
        self._recomputing = 0
        self._elsewhere: OrderedDict[str, int] = OrderedDict()  # key → bytes, on other hosts
        self.counters: Counter[str] = Counter(corrupt=0)
        self._reported = 0  # reports sent so far
        self._peers = Peers(wiring)
        self._ear = zmq.asyncio.Context.shadow(zmq.Context.instance()).socket(zmq.SUB)
        self._ear.setsockopt(zmq.LINGER, 0)
        self._ear.setsockopt(zmq.RECONNECT_IVL, 50)
        self._ear.setsockopt(zmq.SUBSCRIBE, b"")
        self._following = Following(self._ear, wiring.key_file)
        self._reports = RateLimitedPublisher(self._report, change_s=0.05, idle_s=0.5)
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._reports.start()
        self._task = asyncio.create_task(self._listen(), name="features")

    def close(self) -> None:
        self._reports.close()
        if self._looking is not None:
            self._looking.cancel()
        if self._task is not None:
            self._task.cancel()
        self._ear.close()

    # --- requests -------------------------------------------------------------------------------------------------

    def need(self, wait: Wait, given_up: Sequence[str]) -> None:
        """Look for the features of a request. `given_up`: keys that no encoder has made; not waited for."""
        now = asyncio.get_running_loop().time()
        self._waits[wait] = None
        everything = wire.ALL_MISSING in given_up
        for item in wait.items:
            if everything or item.key in given_up:
                wait.lost[item.key] = "not_encoded"
            else:
                wait.until[item.key] = now + self._wiring.feature_wait_s
        self._look(wait, set(wait.until))

    def done(self, wait: Wait) -> None:
        """The request has ended, or left: its pins go. Any number of calls."""
        if wait.over:
            return
        wait.over = True
        self._waits.pop(wait, None)
        for lease in wait.pins.values():
            lease.release()
        wait.pins.clear()
        if wait in self._recompute_queue:
            self._recompute_queue.remove(wait)
        if wait.recomputes:
            self._recomputing -= 1
            self._start_recomputes()
        self._reports.changed()

    # --- features -------------------------------------------------------------------------------------------------

    def _look(self, wait: Wait, keys: set[str]) -> None:
        """Look once for these; then whatever follows for the request."""
        for key in keys & set(wait.until):
            lease = self._lease(key)
            if lease is not None:
                wait.pins[key] = lease
                del wait.until[key]
        if not wait.until:
            self._settle(wait)
        elif self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look_at_deadlines)

    def _lease(self, key: str) -> Lease | None:
        try:
            lease = self._store.lease(key, verify=True)
            if lease is None and key in self._elsewhere:
                self._fetch(key, self._elsewhere[key])
                lease = self._store.lease(key, verify=True)
        except CorruptFeatureError as error:
            self.counters["corrupt"] += 1
            logger.warning("%s", error)
            return None
        except StoreError as error:
            logger.warning("feature %s: %s", key, error)
            return None
        if lease is not None and not belongs_to(key, lease.view()):
            lease.release()
            self.counters["foreign"] += 1
            logger.error("feature %s holds the bytes of another one", key)
            return None
        if lease is not None:
            self.counters["fetched"] += 1
        return lease

    def _fetch(self, key: str, nbytes: int) -> None:
        shape = feature_shape(nbytes // self._bytes_per_token, self._bytes_per_token)
        self._store.put(key, feature_bytes(key, nbytes), shape=shape, dtype=DTYPE)

    def _look_at_deadlines(self) -> None:
        self._looking = None
        now = asyncio.get_running_loop().time()
        for wait in list(self._waits):
            late = {key for key, until in wait.until.items() if until <= now}
            if late:
                self._look(wait, late)
                for key in late & set(wait.until):
                    self._lose(wait, key, "deadline")
        if any(wait.until for wait in self._waits) and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look_at_deadlines)

    def _lose(self, wait: Wait, key: str, cause: str) -> None:
        del wait.until[key]
        wait.lost[key] = cause
        if not wait.until:
            self._settle(wait)

    def _settle(self, wait: Wait) -> None:
        """Nothing is looked for any more: run it, fail it, or let it wait for its turn to recompute."""
        if wait.over or not wait.lost:
            if not wait.over:
                self._go(wait)
            return
        items = {item.key: item for item in wait.items}
        without_media = any(not items[key].has_media for key in wait.lost)
        if wait.must_not_recompute or without_media:
            cause = next(iter(wait.lost.values()))
            self.counters[f"failed.{cause}"] += 1
            lost = dict.fromkeys(map(whole_of, wait.lost))
            self._publisher.send(wire.FeatureMissing(wait.request, list(lost), cause))
            failed = wait.failed
            self.done(wait)
            failed(f"a feature is missing ({cause})")
        elif self._recomputing < self._wiring.recompute_limit:
            self._go(wait)
        else:
            self._recompute_queue.append(wait)

    def _go(self, wait: Wait) -> None:
        self._waits.pop(wait, None)
        if wait.lost:
            wait.recomputes = True
            self._recomputing += 1
            self.counters.update(f"recomputed.{cause}" for cause in wait.lost.values())
        self._reports.changed()
        wait.ready([item for item in wait.items if item.key in wait.lost])

    def _start_recomputes(self) -> None:
        while self._recompute_queue and self._recomputing < self._wiring.recompute_limit:
            self._go(self._recompute_queue.popleft())

    # --- announcements --------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            frames = await self._ear.recv_multipart()
            try:
                self._on_announcement(wire.announcements.decode(frames[-1]))
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed announcement: %s", error)

    def _on_announcement(self, message: wire.Announcement) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(message, wire.FeatureReady):
            if message.host != self._wiring.arena_id and message.pooled:
                self._elsewhere[message.key] = message.nbytes
                if len(self._elsewhere) > _REMEMBERED:
                    self._elsewhere.popitem(last=False)
            for wait in [wait for wait in self._waits if message.key in wait.until]:
                self._look(wait, {message.key})
        elif isinstance(message, wire.FeatureFailed):
            for wait in [wait for wait in self._waits if message.key in wait.until]:
                self._lose(wait, message.key, "encoder_failed")
        elif isinstance(message, wire.FeaturePending):
            keys = set(message.keys)
            for wait in self._waits:
                for key in keys & set(wait.until):
                    wait.until[key] = now + self._wiring.feature_wait_s

    def _report(self) -> None:
        if self._peers.changed():
            self._following.follow(self._peers.encoders())
        self._reported += 1
        self._publisher.send(store_report(self._wiring, self._store, seq=self._reported, counters=dict(self.counters)))
