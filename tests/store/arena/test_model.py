"""The arena against a dict with a bound: any sequence of calls, any contents, two handles."""

from __future__ import annotations

import uuid

import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from store.arena import Arena, Lease, Reservation
from store.errors import StoreError, StoreFullError
from store.feature import FeatureMeta
from tests.store.conftest import get_into

PAGE = 4096
PAGES = 16
SLOTS = 6

keys = st.sampled_from("abcdefghij")
handles = st.integers(0, 1)


class ArenaModel(RuleBasedStateMachine):
    """`stored` is ordered by last use. The arena may forget unleased features, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.path = f"/dev/shm/epd-test-{uuid.uuid4().hex}-arena"
        self.stored: dict[str, bytes] = {}
        self.leases: list[tuple[str, bytes, Lease]] = []
        self.handles: list[Arena] = []
        self.reserved: list[tuple[str, int, Reservation, bool]] = []  # key, handle, room, detached

    @initialize()
    def create(self) -> None:
        self.handles = [Arena.create(self.path, PAGES * PAGE, slots=SLOTS, owners=4), Arena.attach(self.path)]

    def teardown(self) -> None:
        for arena in self.handles:
            arena.close()
        Arena.unlink(self.path)

    def pinned(self) -> set[str]:
        """Readable keys that are leased; a lease on an older feature of the same name does not count."""
        return {key for key, data, _ in self.leases if self.stored.get(key) is data}

    def used(self, key: str) -> None:
        self.stored[key] = self.stored.pop(key)

    @rule(handle=handles, key=keys, pages=st.integers(1, 7), fill=st.binary(min_size=1, max_size=3))
    def put(self, handle: int, key: str, pages: int, fill: bytes) -> None:
        data = (fill * (pages * PAGE))[: pages * PAGE - 5]
        try:
            new = self.handles[handle].put(key, data, shape=(pages, 1), dtype="uint8")
        except StoreFullError:
            self.gave_up(key)
            return
        assert new == (key not in self.stored and not self.is_being_written(key))
        if new:
            self.forget_evicted()
            self.stored[key] = data
        elif key in self.stored and key not in self.pinned():
            self.used(key)

    def is_being_written(self, key: str) -> bool:
        return any(key == name and not detached for name, _, _, detached in self.reserved)

    def gave_up(self, key: str) -> None:
        assert self.leases or self.reserved, "only leases and writers can fill an arena"
        assert key not in self.stored
        self.forget_evicted()
        assert set(self.stored) == self.pinned(), "it gives up only when nothing is left to evict"

    @rule(handle=handles, key=keys, pages=st.integers(1, 7))
    def reserve(self, handle: int, key: str, pages: int) -> None:
        try:
            room = self.handles[handle].reserve(key, pages * PAGE - 5)
        except StoreFullError:
            self.gave_up(key)
            return
        assert (room is not None) == (key not in self.stored and not self.is_being_written(key))
        if room is None:
            if key in self.stored and key not in self.pinned():
                self.used(key)
            return
        self.forget_evicted()
        room.data[:] = 0
        self.reserved.append((key, handle, room, False))

    @rule(which=st.randoms(use_true_random=False), fill=st.integers(0, 255))
    def commit(self, which: object, fill: int) -> None:
        if not self.reserved:
            return
        key, _, room, detached = self.reserved.pop(which.randrange(len(self.reserved)))  # type: ignore[attr-defined]
        room.data[:] = fill
        data = bytes([fill]) * room.nbytes
        meta = FeatureMeta(key, (room.nbytes,), "uint8", room.nbytes, xxhash.xxh3_64_intdigest(data))
        if detached:
            try:
                room.commit(meta)
                raise AssertionError("what may be written to by others was made readable")
            except StoreError:
                room.abandon()
                return
        lease = room.commit(meta)
        room.abandon()  # does nothing now
        self.stored[key] = data
        self.leases.append((key, data, lease))

    @rule(which=st.randoms(use_true_random=False))
    def abandon(self, which: object) -> None:
        if self.reserved:
            _, _, room, _ = self.reserved.pop(which.randrange(len(self.reserved)))  # type: ignore[attr-defined]
            room.abandon()
            room.abandon()

    @rule(which=st.randoms(use_true_random=False))
    def detach(self, which: object) -> None:
        """Its key is free again, its bytes are not."""
        if self.reserved:
            at = which.randrange(len(self.reserved))  # type: ignore[attr-defined]
            key, handle, room, _ = self.reserved[at]
            room.detach()
            self.reserved[at] = (key, handle, room, True)

    def forget_evicted(self) -> None:
        evictable = [key for key in self.stored if key not in self.pinned()]
        gone = [key for key in self.stored if not self.handles[0].contains(key)]
        assert gone == evictable[: len(gone)], "least recently used first, never leased"
        for key in gone:
            del self.stored[key]

    @rule(handle=handles, key=keys)
    def contains(self, handle: int, key: str) -> None:
        assert self.handles[handle].contains(key) == (key in self.stored)

    @rule(handle=handles, key=keys)
    def get_into(self, handle: int, key: str) -> None:
        dest = bytearray(PAGES * PAGE)
        meta = get_into(self.handles[handle], key, dest)
        assert (meta is not None) == (key in self.stored)
        if meta is not None:
            assert dest[: meta.nbytes] == self.stored[key]
            if key not in self.pinned():
                self.used(key)

    @rule(handle=handles, key=keys)
    def lease(self, handle: int, key: str) -> None:
        lease = self.handles[handle].lease(key)
        assert (lease is not None) == (key in self.stored)
        if lease is not None:
            self.leases.append((key, self.stored[key], lease))

    @rule(which=st.randoms(use_true_random=False))
    def release(self, which: object) -> None:
        if self.leases:
            key, data, lease = self.leases.pop(which.randrange(len(self.leases)))  # type: ignore[attr-defined]
            lease.release()
            if self.stored.get(key) is data and key not in self.pinned():
                self.used(key)

    @rule(handle=handles, key=keys)
    def remove(self, handle: int, key: str) -> None:
        assert self.handles[handle].remove(key) == (key in self.stored)
        self.stored.pop(key, None)

    @rule()
    def reopen(self) -> None:
        """Closing a handle ends its leases, and only its own."""
        if any(handle == 1 for _, handle, _, _ in self.reserved):
            return  # what is being written stays taken until the process ends: nothing to see here
        closed = self.handles[1]
        closed.close()
        self.handles[1] = Arena.attach(self.path)
        before = self.pinned()
        self.leases = [entry for entry in self.leases if entry[2]._arena is not closed]
        freed = before - self.pinned()
        # They became idle in the order of their slots, which is not part of the contract: settle it by using them.
        for key in sorted(freed):
            self.get_into(0, key)

    @invariant()
    def leased_bytes_stay(self) -> None:
        for _, data, lease in self.leases:
            assert lease.view() == data

    @invariant()
    def counters_agree(self) -> None:
        if self.handles:
            stats = self.handles[0].stats()
            held = {id(data): data for data in self.stored.values()} | {id(data): data for _, data, _ in self.leases}
            assert stats.features == len(self.stored)
            assert stats.leased == len({id(data) for _, data, _ in self.leases})
            assert stats.used_bytes == sum(-(-len(data) // PAGE) * PAGE for data in held.values()) + sum(
                -(-room.nbytes // PAGE) * PAGE for _, _, room, _ in self.reserved
            )
            entries = self.handles[0].entries()
            assert [entry.meta.key for entry in entries if not entry.leases] == [
                key for key in self.stored if key not in self.pinned()
            ], "the least recently used first"
            assert {entry.meta.key for entry in entries if entry.leases} == self.pinned()


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
