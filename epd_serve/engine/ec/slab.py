"""Scheduler side of the slab: which features are copied to the devices of all ranks ahead of the steps that read them.

A feature that is here is copied from the arena to one place of a slab of device memory, the same on every rank, and is
ready when the last rank says that it has it (`slab_copier.py`). Steps that read it get a view. **The slab promises
nothing**: what has no place in it is copied in the step, so nobody waits for room in it, and what a request holds until
its end are the arena's pins alone. A place is kept

    while it is being copied                        the arena's copy is pinned meanwhile
    while requests wait for it, or will             `Features.awaits`: nothing is written down here
    promised                                        from when a request is let through until vLLM takes the feature
    cached                                          until vLLM has freed it (`free_encoder_mm_hashes`), or
                                                    emptied its cache (`reset_encoder_cache`)

What vLLM frees in a step may still be read by what was queued before that step: whoever copies to such a place waits
for that on the device (`SlabCopy.freed_in`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import zmq

from epd_serve import wire
from epd_serve.engine.ec.features import Features
from epd_serve.engine.ec.slab_places import Place, SlabPlaces
from epd_serve.sockets import bind, open_socket
from store.arena import Lease

logger = logging.getLogger(__name__)


@dataclass
class _Copy:
    """One that is under way. `lease`: what it reads. `corrupt`: nobody may read what it writes."""

    place: Place
    lease: Lease
    corrupt: bool = False


@dataclass
class FeatureSlab:
    """One per scheduler of who prefills. What is kept of it is guarded by the lock of `features`.

    Nothing is in it before every rank has opened its slab, which it does when its graphs are captured.

    Args:
        address: where the workers connect to.
        ranks: how many there are.

    Attributes:
        socket: the listener's.
    """

    address: str
    ranks: int
    features: Features
    socket: zmq.Socket[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.socket = open_socket(zmq.ROUTER)
        bind(self.socket, self.address)
        self._opened: dict[int, tuple[bytes, int]] = {}  # by rank: how it is addressed, and the size of its slab
        self._places: SlabPlaces | None = None  # when all have opened theirs
        self._copies: dict[int, _Copy] = {}
        self._jobs = itertools.count(1)
        self._freed_in = 0

    # --- the listener's thread --------------------------------------------------------------------------------------

    def is_copied(self, key: str) -> bool:
        """Whether it is on its way just now."""
        with self.features.lock:
            return self._places is not None and (place := self._places.find(key)) is not None and bool(place.copying)

    def copy(self, lease: Lease, now: float) -> bool:
        """Have this feature copied, unless it is there already or has no room. The lease is kept until it is there.

        True: `hear` will say when that is.
        """
        with self.features.lock:
            places, key = self._places, lease.meta.key
            if places is None:
                return False
            if (place := places.find(key)) is not None:
                if place.copying:
                    lease.release()
                return bool(place.copying)
            place = places.reserve(key, lease.nbytes, lambda other: self.features.awaits(other, now))
            if place is None:
                self.features.counters["slab_full"] += 1
                return False
            place.copying.update(self._opened)
            job, freed_in = next(self._jobs), self._freed_in
            self._copies[job] = _Copy(place, lease)
        order = wire.encode(wire.SlabCopy(job, lease.offset, place.offset, lease.nbytes, freed_in))
        for worker, _ in self._opened.values():
            self.socket.send_multipart([worker, order])
        return True

    def spoil(self, key: str) -> None:
        """What is on its way has proved to be corrupt: nobody reads it."""
        with self.features.lock:
            next(copy for copy in self._copies.values() if copy.place.key == key).corrupt = True

    def hear(self) -> list[Lease]:
        """What the workers have said meanwhile. Returns features that every rank has now: the caller releases them."""
        there: list[Lease] = []
        while self.socket.poll(0):
            worker, word = self.socket.recv_multipart()
            match wire.from_slab_worker.decode(word):
                case wire.SlabOpened() as opened:
                    self._open(worker, opened)
                case wire.SlabCopied() as copied:
                    with self.features.lock:
                        copy = self._copies[copied.job]
                        copy.place.copying.discard(copied.rank)
                        if not copy.place.copying:
                            self._copies.pop(copied.job)
                            if self._places is not None and copy.corrupt:
                                self._places.forget(copy.place)
                                copy.lease.release()
                            else:
                                self.features.counters["slab_copied"] += 1
                                there.append(copy.lease)
        return there

    def _open(self, worker: bytes, opened: wire.SlabOpened) -> None:
        with self.features.lock:
            self._opened[opened.rank] = worker, opened.nbytes
            if len(self._opened) == self.ranks:
                self._places = SlabPlaces(min(nbytes for _, nbytes in self._opened.values()))
                logger.info("features go to %d MiB of device memory ahead of their steps", opened.nbytes >> 20)

    # --- the scheduler's thread -------------------------------------------------------------------------------------

    def promise(self, request: str, sizes: Mapping[str, int], now: float) -> bool:
        """This request is let through with these features, by size in bytes: those that are there stay until vLLM takes
        them. False, and nothing happens, where one is not there that has room: it can be copied before. Locked.
        """
        if (places := self._places) is None:
            return True
        found = {key: places.find(key) for key in sizes}
        for key, place in found.items():
            if place is not None and place.copying:
                return False
            if place is None and places.fits(sizes[key], lambda other: self.features.awaits(other, now)):
                return False
        for place in found.values():
            if place is not None:
                place.promised.add(request)
        return True

    def cache(self, key: str) -> int | None:
        """vLLM's encoder cache takes this feature. Where it is in the slab; None: it is copied in the step."""
        with self.features.lock:
            place = self._places.find(key) if self._places is not None else None
            if self._places is None or place is None or place.copying:
                return None
            place.cached = True
            place.promised.clear()  # whoever else needs it finds it in vLLM's cache
            self._places.use(place)
            return place.offset

    def free(self, keys: Collection[str] | None, step: int) -> bool:
        """vLLM frees these in this step, or all that it has. Whether one of them is in the slab."""
        with self.features.lock:
            freed = [place for place in self._places or () if place.cached and (keys is None or place.key in keys)]
            for place in freed:
                place.cached = False
            if freed:
                self._freed_in = step
        return bool(freed)

    def release(self, requests: Iterable[str]) -> None:
        """These requests have ended. Locked."""
        for place in self._places or ():
            place.promised.difference_update(requests)

    def close(self) -> None:
        """When the listener has ended."""
        self.socket.close()
