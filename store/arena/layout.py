"""Where everything lies in an arena file. Pure; the code that moves bytes is elsewhere.

    header | owner rows | hash buckets | slot table | lease counts | features (aligned)

All but the lease counts (uint32) are 64-bit words in the host's byte order. The *truth* is the owner rows, the lease
counts and, per slot, state, place and names; buckets, rings, totals and the free list are derived from it and are
rebuilt when a process died while it changed them (`store.arena.index`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from store.errors import StoreError

MAGIC = int.from_bytes(b"EPDarena", "little")
VERSION = 2
PAGE = 4096
WORD = 8

# Header words.
H_MAGIC, H_VERSION, H_CAPACITY, H_SLOTS, H_OWNERS, H_ALIGNMENT = range(6)
H_HOLDER = 6  # pid (in its own PID namespace) inside the critical section, 0 when the index is whole
H_FREE = 7  # head of the free slots
H_ROVER = 8  # slot after which the next search for room starts
H_WIDEST = 9  # no gap is wider than this many bytes
H_TICK = 10  # latest time of use given out, CLOCK_MONOTONIC ns
H_REAPED_NS = 11  # CLOCK_MONOTONIC of the last look for dead processes
H_USED, H_FEATURES, H_LEASED = 12, 13, 14
H_PUTS, H_HITS, H_MISSES, H_EVICTIONS, H_CORRUPT, H_RECLAIMED = range(15, 21)
HEADER_WORDS = 64

# Owner rows: one per process that has the arena open and keeps a lock on the row's bytes (`store.arena.owners`).
O_TAKEN = 0
OWNER_WORDS = 1

# Slot words. Slot 0 is no feature: it heads both rings and stands for "none".
S_STATE, S_HASH, S_OFFSET, S_NBYTES, S_SPAN, S_CHECKSUM, S_CHECKED, S_OWNER = range(8)
S_TICK = 8  # last use, CLOCK_MONOTONIC ns
S_PINS = 9  # leases of all processes
S_PLACE_PREV, S_PLACE_NEXT = 10, 11  # ring in order of offset
S_USE_PREV, S_USE_NEXT = 12, 13  # ring of evictable features, least recently used first
S_CHAIN = 14  # next in the hash bucket, or next free slot
S_LENGTHS = 15  # key bytes | dtype bytes << 16 | dimensions << 32
S_SHAPE = 16
S_TEXT = 24  # key, then dtype
SLOT_WORDS = 48

MAX_DIMENSIONS = S_TEXT - S_SHAPE
MAX_TEXT_BYTES = (SLOT_WORDS - S_TEXT) * WORD

# Slot states.
FREE = 0
ALLOCATED = 1  # space taken, being written, not readable
READY = 2
DROPPED = 3  # removed or corrupt while leased: unreadable, its space returns with the last lease


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` (a power of two) that is not below `value`."""
    return (value + alignment - 1) & -alignment


@dataclass(frozen=True)
class Geometry:
    """The sizes that fix a file's layout.

    Attributes:
        capacity_bytes: room for features, a multiple of `alignment`.
        slots: most features at one time.
        owners: most processes at one time.
        alignment: every feature starts at a multiple of it, in bytes.
    """

    capacity_bytes: int
    slots: int
    owners: int
    alignment: int

    def __post_init__(self) -> None:
        if self.alignment < 64 or self.alignment & (self.alignment - 1):
            raise StoreError(f"arena: alignment {self.alignment} is not a power of two of at least 64")
        if self.capacity_bytes < self.alignment or self.capacity_bytes % self.alignment:
            raise StoreError(f"arena: capacity {self.capacity_bytes} is not a positive multiple of {self.alignment}")
        if not 1 <= self.slots <= 1 << 20 or not 1 <= self.owners <= 1 << 12:
            raise StoreError(f"arena: {self.slots} slots or {self.owners} processes is out of range")

    @cached_property
    def buckets(self) -> int:
        """Number of hash buckets, a power of two."""
        return 1 << (2 * self.slots - 1).bit_length()

    @cached_property
    def buckets_word(self) -> int:
        return HEADER_WORDS + self.owners * OWNER_WORDS

    @cached_property
    def slots_word(self) -> int:
        return self.buckets_word + self.buckets

    @cached_property
    def words(self) -> int:
        """Words from the file's start to the lease counts."""
        return self.slots_word + (self.slots + 1) * SLOT_WORDS

    @cached_property
    def leases_bytes(self) -> int:
        return self.owners * (self.slots + 1) * 4

    @cached_property
    def data_byte(self) -> int:
        """Where the features start."""
        return align_up(self.words * WORD + self.leases_bytes, max(self.alignment, PAGE))

    @cached_property
    def file_bytes(self) -> int:
        return self.data_byte + self.capacity_bytes
