"""Scheduler side of the slab: which features are on the devices of all ranks ahead of the steps that read them.

A feature that is here is copied from the arena to one place of a slab of device memory, the same on every rank, and is
ready when the last rank says that it has it (`slab_copier.py`). Or its encoder writes it there (`pusher.py`): the place
is reserved, and when no rank reads any more what lay there, the encoder is told where it is. Steps that read it get a
view. **The slab promises nothing**: what has no place in it is copied in the step, so nobody waits for room in it, and
what a request holds until its end are pins of the arena, and places of what only the slab has. A place is kept

    while it is being copied                        the arena's copy is pinned meanwhile
    while its encoder may write to it               whether somebody still waits for that or not
    while requests wait for it, or will             `Features.awaits`: nothing is written down here
    promised                                        from when a request is let through until vLLM takes the feature
    cached                                          until vLLM has freed it (`free_encoder_mm_hashes`), or
                                                    emptied its cache (`reset_encoder_cache`)
    held                                            by requests that run and find the feature nowhere else

What vLLM frees in a step may still be read by what was queued before that step: whoever writes to such a place waits
for that on the device (`SlabCopy.freed_in`).

**Nobody waits for a write that does not come.** Once the store has the feature its encoder has `GRACE_S` and what the
bytes take at `BYTES_PER_S`, and `FIRST_S` for its first one, which connects the two; a row that is looked up for the
last time waits no more. The place is nobody's then, and its encoder is not asked for anything else, until

    its encoder says how it went                    whole, or never begun: it is free; failed: as below, from then on
    another life of its encoder is heard of         `MooncakeReceiveSide.quarantine_s` later
    it says nothing                                 `SILENT_S`: a stopped process may go on
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import zmq

from epd_serve import wire
from epd_serve.engine.ec.features import Features
from epd_serve.engine.ec.slab_places import Place, SlabPlaces
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.sockets import Socket, bind, connect, open_socket
from store.arena import Lease
from store.errors import StoreError
from store.feature import FeatureMeta

logger = logging.getLogger(__name__)

OFFER_S = 10.0
"""For how long what an encoder has made is had from there rather than from the store."""
FIRST_S, GRACE_S, BYTES_PER_S = 1.0, 0.05, 200e6
DOUBT_S = 10.0
"""For how long an encoder is not asked whose write has failed."""
SILENT_S = 600.0

_MAX_OFFERS = 1024
_WRITER = -1  # among those who copy to a place: its encoder


@dataclass
class _Copy:
    """One that is under way. `lease`: what it reads. `corrupt`: nobody may read what it writes."""

    place: Place
    lease: Lease
    corrupt: bool = False


@dataclass
class _Offer:
    """What an encoder has made. `stored`: the store has it, too."""

    made: wire.FeatureMade
    until: float
    stored: bool = False


@dataclass
class _Push:
    """A place that an encoder writes to, or is about to.

    Attributes:
        due: it is waited for until then; -inf: no more.
        lands_until: it may be written to until then.
    """

    made: wire.FeatureMade
    place: Place
    due: float = math.inf
    lands_until: float = math.inf


@dataclass
class Hold:
    """Keeps a place for a request, as a lease of the arena does (`features.Pin`). Both ends hold the features' lock."""

    place: Place
    meta: FeatureMeta
    slot: int = -1
    offset: int = 0

    def release(self) -> None:
        self.place.held -= 1


@dataclass
class FeatureSlab:
    """One per scheduler of who prefills. What is kept of it is guarded by the lock of `features`.

    Nothing is in it before every rank has opened its slab, which it does when its graphs are captured.

    Args:
        address: where the workers connect to.
        ranks: how many there are.
        key_file: of the deployment's key, where encoders may be on other nodes.

    Attributes:
        socket: the listener's.
        poller: the listener's, too: answers of encoders wake it.
    """

    address: str
    ranks: int
    features: Features
    key_file: str = ""
    socket: Socket = field(init=False)
    poller: zmq.Poller = field(default_factory=zmq.Poller)

    def __post_init__(self) -> None:
        self.socket = open_socket(zmq.ROUTER)
        bind(self.socket, self.address)
        self.poller.register(self.socket, zmq.POLLIN)
        self._opened: dict[int, tuple[bytes, wire.SlabOpened]] = {}  # by rank: how it is addressed, what it said
        self._places: SlabPlaces | None = None  # when all have opened theirs
        self._copies: dict[int, _Copy] = {}
        self._pushes: dict[int, _Push] = {}
        self._offers: OrderedDict[str, _Offer] = OrderedDict()
        self._encoders: dict[str, Socket] = {}  # by instance: where it takes orders
        self._unreachable: frozenset[str] = frozenset()
        self._doubted: dict[str, float] = {}  # life of an encoder → until when
        self._proven: set[str] = set()  # those that have written here
        self._jobs = itertools.count(1)
        self._freed_in = 0

    # --- the listener's thread --------------------------------------------------------------------------------------

    def is_coming(self, key: str, now: float, *, last: bool = False) -> bool:
        """Whether it is being copied or written just now, or will be: its encoder has been asked. `last`: it is looked
        up for the last time, and not waited for if its encoder has to write it."""
        with self.features.lock:
            if self._places is None:
                return False
            if (place := self._places.find(key)) is None:
                return not last and self._ask(self._places, key, now)
            push = next((push for push in self._pushes.values() if push.place is place), None)
            if push is not None and (last or push.due < now):
                self._give_up(push, "push_late", now)
            return bool(place.key and place.copying)

    def has(self, key: str) -> FeatureMeta | None:
        """What of this feature is known, where it is in the slab, whole."""
        with self.features.lock:
            place = self._whole(key)
            return place.meta if place is not None else None

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
            if (place := self._reserve(places, lease.meta, now)) is None:
                return False
            job = next(self._jobs)
            self._copies[job] = _Copy(place, lease)
            self._order(wire.SlabCopy(job, lease.offset, place.offset, lease.nbytes, self._freed_in))
        return True

    def spoil(self, key: str) -> None:
        """What is on its way has proved to be corrupt: nobody reads it."""
        with self.features.lock:
            next(copy for copy in self._copies.values() if copy.place.key == key).corrupt = True

    def note(self, event: wire.Announcement, now: float) -> None:
        """What encoders announce."""
        with self.features.lock:
            match event:
                case wire.FeatureMade():
                    self._offers[event.key] = _Offer(event, now + OFFER_S)
                    while len(self._offers) > _MAX_OFFERS:
                        self._offers.popitem(last=False)
                case wire.FeatureReady():  # and the store of this host can have it
                    if (offer := self._offers.get(event.key)) is not None:
                        offer.stored = True
                    for push in self._pushes.values():
                        if push.made.key == event.key:
                            push.due = min(push.due, self._due(push.made, now))
                case wire.StoreReport():
                    for push in self._pushes.values():
                        if push.made.instance == event.instance and push.made.incarnation != event.incarnation:
                            self._writer_is_gone(push, now)

    def follow(self, encoders: Collection[str], unreachable: frozenset[str], now: float) -> None:
        """Which instances encode, and which of them cannot write to these devices."""
        with self.features.lock:
            self._unreachable = unreachable
            for push in self._pushes.values():
                if push.made.instance not in encoders:
                    self._writer_is_gone(push, now)
            for name in self._encoders.keys() - encoders:
                self.poller.unregister(self._encoders[name])
                self._encoders.pop(name).close()

    def may_come(self, key: str, now: float) -> bool:
        """Whether its encoder writes it, or would if a request asked for it now. Locked."""
        return any(push.place.key == key for push in self._pushes.values()) or self._offer(key, now) is not None

    def hear(self, now: float) -> list[FeatureMeta]:
        """What workers and encoders have said meanwhile. Returns features that every rank has now."""
        there: list[FeatureMeta] = []
        while self.socket.poll(0):
            worker, word = self.socket.recv_multipart()
            match wire.from_slab_worker.decode(word):
                case wire.SlabOpened() as opened:
                    self._open(worker, opened)
                case wire.SlabCopied() as copied:
                    with self.features.lock:
                        there += self._copied(copied, now)
        for encoder in self._encoders.values():
            while encoder.poll(0):
                pushed = wire.from_encoder.decode(encoder.recv())
                with self.features.lock:
                    there += self._pushed(pushed, now)
        with self.features.lock:
            for job, push in list(self._pushes.items()):
                if push.lands_until <= now:
                    self._free(job, push)
        return there

    def _open(self, worker: bytes, opened: wire.SlabOpened) -> None:
        with self.features.lock:
            self._opened[opened.rank] = worker, opened
            if len(self._opened) == self.ranks:
                self._places = SlabPlaces(min(one.nbytes for _, one in self._opened.values()))
                logger.info("features go to %d MiB of device memory ahead of their steps", opened.nbytes >> 20)

    def _reserve(self, places: SlabPlaces, meta: FeatureMeta, now: float) -> Place | None:
        place = places.reserve(meta.key, meta.nbytes, lambda other: self.features.awaits(other, now))
        if place is None:
            self.features.counters["slab_full"] += 1
            return None
        place.meta = meta
        place.copying.update(self._opened)
        return place

    def _order(self, order: wire.SlabCopy) -> None:
        word = wire.encode(order)
        for worker, _ in self._opened.values():
            self.socket.send_multipart([worker, word])

    def _copied(self, copied: wire.SlabCopied, now: float) -> Iterable[FeatureMeta]:
        push = self._pushes.get(copied.job)
        if push is None and copied.job not in self._copies:
            return  # one that was given up
        place = push.place if push is not None else self._copies[copied.job].place
        place.copying.discard(copied.rank)
        if place.copying:
            return
        if push is not None:
            self._tell_encoder(copied.job, push, now)
            return
        copy = self._copies.pop(copied.job)
        copy.lease.release()
        if copy.corrupt and self._places is not None:
            self._places.forget(place)
        else:
            self.features.counters["slab_copied"] += 1
            yield copy.lease.meta

    # --- written by encoders ----------------------------------------------------------------------------------------

    def _ask(self, places: SlabPlaces, key: str, now: float) -> bool:
        """Reserve a place for what its encoder has made lately. Locked."""
        if (offer := self._offer(key, now)) is None:
            return False
        made = offer.made
        try:
            meta = FeatureMeta(key, tuple(made.shape), made.dtype, made.nbytes)
        except StoreError as error:
            logger.warning("feature %s is not asked for: %s", key, error)
            return False
        if (place := self._reserve(places, meta, now)) is None:
            del self._offers[key]
            return False
        job = next(self._jobs)
        self._pushes[job] = _Push(made, place, self._due(made, now) if offer.stored else math.inf)
        self._order(wire.SlabCopy(job, 0, place.offset, 0, self._freed_in))
        return True

    def _offer(self, key: str, now: float) -> _Offer | None:
        """What an encoder has made lately that can write it here."""
        offer = self._offers.get(key)
        if offer is None or offer.until < now or self._places is None:
            return None
        life, written_to = offer.made.incarnation, all(one.session for _, one in self._opened.values())
        owes = any(push.due == -math.inf and push.made.incarnation == life for push in self._pushes.values())
        barred = owes or offer.made.instance in self._unreachable or self._doubted.get(life, 0.0) > now
        return offer if written_to and not barred else None

    def _tell_encoder(self, job: int, push: _Push, now: float) -> None:
        """No rank reads any more what lay there."""
        if push.due == -math.inf:  # meanwhile nobody waits for it
            self._free(job, push)
            return
        push.place.copying.add(_WRITER)
        push.lands_until = min(push.lands_until, now + SILENT_S)
        made, ranks = push.made, (one for _, (_, one) in sorted(self._opened.items()))
        if made.instance not in self._encoders:
            self._encoders[made.instance] = opened = open_socket(zmq.DEALER)
            opened.setsockopt(zmq.SNDHWM, 0)  # this thread waits for nobody
            connect(opened, made.push, self.key_file)
            self.poller.register(opened, zmq.POLLIN)
        targets = [(one.session, one.base + push.place.offset) for one in ranks]
        self._encoders[made.instance].send(wire.encode(wire.Push(job, made.key, made.nbytes, targets)))

    def _pushed(self, pushed: wire.Pushed, now: float) -> Iterable[FeatureMeta]:
        push = self._pushes.get(pushed.job)
        if push is None:
            return
        if pushed.wrote == "all":
            self._proven.add(push.made.incarnation)
        if pushed.wrote == "all" and push.due > -math.inf:
            assert push.place.meta is not None
            self.features.counters["pushed"] += 1
            self._free(pushed.job, push)
            yield push.place.meta
            return
        if pushed.reason:
            logger.warning("feature %s comes from the store: %s", push.made.key, pushed.reason)
        self._give_up(push, "push_failed" if pushed.wrote == "some" else "push_refused", now)
        if pushed.wrote == "some":
            push.lands_until = now + MooncakeReceiveSide.quarantine_s
        else:
            self._free(pushed.job, push)

    def _give_up(self, push: _Push, cause: str, now: float) -> None:
        """Nobody waits for it any more, and nobody else gets its place yet. Locked."""
        if push.due == -math.inf:
            return
        push.due = -math.inf
        self.features.counters[cause] += 1
        if cause == "push_failed":
            self._doubted[push.made.incarnation] = now + DOUBT_S
        self._offers.pop(push.made.key, None)
        assert self._places is not None
        self._places.forget(push.place)
        self.features.look_now(push.made.key)

    def _due(self, made: wire.FeatureMade, now: float) -> float:
        """Until when it is waited for, where the store has it as well."""
        return now + (GRACE_S if made.incarnation in self._proven else FIRST_S) + made.nbytes / BYTES_PER_S

    def _writer_is_gone(self, push: _Push, now: float) -> None:
        """Its process has ended. Locked."""
        push.lands_until = min(push.lands_until, now + MooncakeReceiveSide.quarantine_s)
        self._give_up(push, "push_failed", now)

    def _free(self, job: int, push: _Push) -> None:
        """Nothing is written to its place any more. Locked."""
        del self._pushes[job]
        push.place.copying.clear()

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

    def hold(self, keys: Iterable[str]) -> dict[str, Hold]:
        """Keeps those of these features that are there, whole, until each is released. Locked."""
        held: dict[str, Hold] = {}
        for key in keys:
            if (place := self._whole(key)) is not None and place.meta is not None:
                place.held += 1
                held[key] = Hold(place, place.meta)
        return held

    def cache(self, key: str) -> int | None:
        """vLLM's encoder cache takes this feature. Where it is in the slab; None: it is copied in the step."""
        with self.features.lock:
            if self._places is None or (place := self._whole(key)) is None:
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
        for socket in (self.socket, *self._encoders.values()):
            socket.close()

    def _whole(self, key: str) -> Place | None:
        place = self._places.find(key) if self._places is not None else None
        return place if place is not None and not place.copying else None
