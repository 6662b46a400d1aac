"""Which features are, or are coming, in the slabs of all workers of one instance. Pure: no sockets, threads or clocks.

The scheduler side governs the slabs: one book of offsets for all ranks, whose slabs are alike. A rank only executes
"fetch this key to that offset"; so what is READY here is at the same offset in every rank, and pinning and eviction
need no message. One attempt per fetch:

    fetch --> COMING --all ranks verified it--> READY (named in the book, pinned for the caller)
              COMING --one rank failed | deadline--> ABANDONED --all ranks settled--> (place is free again)

ABANDONED keeps its place pinned: a transfer that is late may still write there. The failure is told at once. A key
may be fetched again while an attempt for it is abandoned; answers carry the attempt's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from epd_serve import wire
from epd_serve.engine.ec.device_slab import Place, SlabBook
from epd_serve.engine.ec.device_trailer import TRAILER_BYTES, FeatureShape

GUESSED_BYTES = 4 << 20
"""Room for a feature whose size nobody announced, at most 1/8 of the slab; one that needs more is fetched again."""


@dataclass(frozen=True, eq=False)
class DevicePin:
    """A verified feature at `offset` of every worker's slab; it stays there until `release`."""

    key: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    unpin: Callable[[DevicePin], None] = field(repr=False)

    def release(self) -> None:
        """Ends the pin. Once, from any thread."""
        self.unpin(self)


@dataclass(frozen=True)
class Pinned:
    """An attempt succeeded; the receiver owns the pin."""

    pin: DevicePin

    @property
    def key(self) -> str:
        return self.pin.key


@dataclass(frozen=True)
class Failed:
    """An attempt ended. `cause`: missing, corrupt, full, unavailable or deadline."""

    key: str
    cause: str
    reason: str


@dataclass
class _Attempt:
    key: str
    place: Place
    writer: str
    deadline: float
    waiting: set[int]  # ranks that have not answered
    touching: set[int]  # ranks whose transfer may still write
    shape: FeatureShape | None = None
    nbytes: int = 0
    abandoned: bool = False


@dataclass
class FetchLedger:
    """Not thread-safe; the owner holds one lock around every call, sends `outgoing` to all ranks, reports `events`."""

    book: SlabBook
    ranks: int
    wait_s: float
    unpin: Callable[[DevicePin], None]
    outgoing: list[wire.FetchInto] = field(default_factory=list)
    events: list[Pinned | Failed] = field(default_factory=list)
    _attempts: dict[int, _Attempt] = field(default_factory=dict)
    _coming: dict[str, int] = field(default_factory=dict)
    _features: dict[str, tuple[int, FeatureShape]] = field(default_factory=dict)
    _last_seq: int = 0

    def try_local(self, key: str) -> DevicePin | None:
        """A further pin of a feature that every rank has; None when it is not here (yet)."""
        place = self.book.find(key)
        if place is None:
            return None
        self.book.pin(place)
        return self._pin(key, place)

    def fetch(self, key: str, nbytes: int, now: float, *, writer: str = "") -> None:
        """Brings a feature in, or joins the attempt under way; an event follows. `nbytes` 0: unknown."""
        if key in self._coming:
            return
        if (pin := self.try_local(key)) is not None:
            self.events.append(Pinned(pin))
            return
        capacity = (nbytes or min(GUESSED_BYTES, self.book.capacity // 8)) + TRAILER_BYTES
        place = self.book.reserve(capacity)
        if place is None:
            used = f"{self.book.pinned_bytes} of {self.book.capacity} bytes are pinned"
            self.events.append(Failed(key, "full", f"no room for {capacity} bytes: {used}"))
            return
        self._last_seq += 1
        everyone = set(range(self.ranks))
        attempt = _Attempt(key, place, writer, now + self.wait_s, everyone, set(everyone))
        self._attempts[self._last_seq] = attempt
        self._coming[key] = self._last_seq
        self.outgoing.append(wire.FetchInto(self._last_seq, key, place.offset, capacity, writer))

    def fetched(self, rank: int, message: wire.Fetched, now: float) -> None:
        """A rank has the feature, verified."""
        attempt = self._attempts.get(message.seq)
        if attempt is None or rank not in attempt.waiting:
            return
        attempt.waiting.discard(rank)
        shape = FeatureShape(tuple(message.shape), message.dtype)
        if attempt.shape is not None and (attempt.shape, attempt.nbytes) != (shape, message.nbytes):
            self._abandon(message.seq, "corrupt", f"ranks have it as {attempt.shape} and as {shape}")
        attempt.shape, attempt.nbytes = shape, message.nbytes
        self._settled(rank, message.seq)
        if attempt.waiting or attempt.abandoned:
            return
        del self._attempts[message.seq], self._coming[attempt.key]
        self.book.shrink(attempt.place, message.nbytes + TRAILER_BYTES)  # its size may have been a guess
        self.book.name(attempt.place, attempt.key)
        self._features[attempt.key] = message.nbytes, shape
        self._forget_evicted()
        self.events.append(Pinned(self._pin(attempt.key, attempt.place)))

    def failed(self, rank: int, message: wire.FetchFailed, now: float) -> None:
        """A rank does not have it. The others may still be at it."""
        attempt = self._attempts.get(message.seq)
        if attempt is None or rank not in attempt.waiting:
            return
        attempt.waiting.discard(rank)
        if message.cause == "size" and not attempt.abandoned:
            again = attempt.place.nbytes < message.nbytes + TRAILER_BYTES
            self._abandon(message.seq, *(("", "") if again else ("corrupt", message.reason)))
            if again:
                self.fetch(attempt.key, message.nbytes, now, writer=attempt.writer)
        else:
            self._abandon(message.seq, message.cause, message.reason)
        if message.settled:
            self._settled(rank, message.seq)

    def settled(self, rank: int, message: wire.FetchSettled) -> None:
        """A rank's late transfer has ended."""
        self._settled(rank, message.seq)

    def expire(self, now: float) -> None:
        """Gives up what took too long."""
        for seq, attempt in list(self._attempts.items()):
            if not attempt.abandoned and now >= attempt.deadline:
                self._abandon(seq, "deadline", f"ranks {sorted(attempt.waiting)} did not answer in {self.wait_s:g} s")

    def release(self, pin: DevicePin) -> None:
        place = self.book.find(pin.key)
        assert place is not None and place.offset == pin.offset, "a pinned feature stays in its place"
        self.book.unpin(place)

    def busy(self) -> bool:
        """Whether an attempt has a deadline to watch."""
        return bool(self._coming)

    def _abandon(self, seq: int, cause: str, reason: str) -> None:
        attempt = self._attempts[seq]
        if attempt.abandoned:
            return
        attempt.abandoned = True
        del self._coming[attempt.key]
        if cause:
            self.events.append(Failed(attempt.key, cause, reason))

    def _settled(self, rank: int, seq: int) -> None:
        attempt = self._attempts.get(seq)
        if attempt is None:
            return
        attempt.touching.discard(rank)
        if attempt.abandoned and not attempt.touching:
            del self._attempts[seq]
            self.book.unpin(attempt.place)

    def _pin(self, key: str, place: Place) -> DevicePin:
        nbytes, shape = self._features[key]
        return DevicePin(key, place.offset, nbytes, shape.shape, shape.dtype, self.unpin)

    def _forget_evicted(self) -> None:
        if len(self._features) > 2 * self.book.named + 64:
            self._features = {key: value for key, value in self._features.items() if self.book.find(key) is not None}
