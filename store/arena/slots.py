"""The slot table: what is written in a slot, which slot has a key, which slots are free. Callers hold the arena's lock.

A slot's state word is written after everything that it vouches for, and before anything that undoes it, so that a
process may die between any two stores.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from store.arena.layout import (
    ALLOCATED,
    FREE,
    H_FREE,
    MAX_DIMENSIONS,
    MAX_TEXT_BYTES,
    S_CHAIN,
    S_CHECKED,
    S_CHECKSUM,
    S_HASH,
    S_LENGTHS,
    S_NBYTES,
    S_OWNER,
    S_SHAPE,
    S_STATE,
    S_TEXT,
    SLOT_WORDS,
    WORD,
    Geometry,
)
from store.errors import StoreError
from store.feature import FeatureMeta


class Name(NamedTuple):
    """A key as the table compares it."""

    text: bytes
    digest: int

    @classmethod
    def of(cls, key: str) -> Name:
        """Raises StoreError for a key that no slot can hold."""
        text = key.encode("utf-8", "surrogatepass")
        if not 0 < len(text) <= MAX_TEXT_BYTES:
            raise StoreError(f"key of {len(text)} bytes; 1 to {MAX_TEXT_BYTES} fit")
        return cls(text, xxhash.xxh3_64_intdigest(text))


class Record(NamedTuple):
    """What the writer says of a feature."""

    name: Name
    shape: tuple[int, ...]
    dtype: bytes
    nbytes: int

    @classmethod
    def of(cls, name: Name, shape: Sequence[int], dtype: str, nbytes: int) -> Record:
        """Raises StoreError for what no slot can hold."""
        record = cls(name, tuple(map(operator.index, shape)), dtype.encode(), nbytes)
        if nbytes < 1:
            raise StoreError("a feature has at least one byte")
        if len(record.shape) > MAX_DIMENSIONS or (
            record.shape and not 0 <= min(record.shape) <= max(record.shape) < 1 << 63
        ):
            raise StoreError(f"shape {record.shape}: at most {MAX_DIMENSIONS} dimensions, none negative")
        if len(name.text) + len(record.dtype) > MAX_TEXT_BYTES:
            raise StoreError(f"key and dtype of {len(name.text)} + {len(record.dtype)} bytes; {MAX_TEXT_BYTES} fit")
        return record


class SlotTable:
    """Records by slot, slots by name."""

    def __init__(self, file: memoryview, words: memoryview, geometry: Geometry) -> None:
        self._file = file
        self._words = words
        self._table = geometry.slots_word
        self._slots = geometry.slots
        self._buckets = geometry.buckets_word
        self._bucket_mask = geometry.buckets - 1

    def find(self, name: Name) -> int:
        """The slot that holds the name, readable or being written; 0 when there is none."""
        words, table = self._words, self._table
        slot = words[self._buckets + (name.digest & self._bucket_mask)]
        while slot:
            at = table + slot * SLOT_WORDS
            if words[at + S_HASH] == name.digest and self._key(at) == name.text:
                return int(slot)
            slot = words[at + S_CHAIN]
        return 0

    def _key(self, at: int) -> bytes:
        start = (at + S_TEXT) * WORD
        return bytes(self._file[start : start + (self._words[at + S_LENGTHS] & 0xFFFF)])

    def free_slot(self) -> int:
        """A free slot, left in the free list; 0 when there is none."""
        return int(self._words[H_FREE])

    def fill(self, slot: int, record: Record, owner: int) -> None:
        """Takes `slot`, the head of the free list: ALLOCATED, findable by name. Its place is already in it."""
        words, name = self._words, record.name
        at = self._table + slot * SLOT_WORDS
        words[H_FREE] = words[at + S_CHAIN]
        words[at + S_HASH] = name.digest
        words[at + S_NBYTES] = record.nbytes
        words[at + S_CHECKED] = 0
        words[at + S_OWNER] = owner
        words[at + S_LENGTHS] = len(name.text) | len(record.dtype) << 16 | len(record.shape) << 32
        for index, size in enumerate(record.shape, at + S_SHAPE):
            words[index] = size
        text = name.text + record.dtype
        start = (at + S_TEXT) * WORD
        self._file[start : start + len(text)] = text
        words[at + S_STATE] = ALLOCATED
        self.link(slot)

    def describe(self, slot: int, record: Record) -> None:
        """Gives a slot that is still being written the shape and dtype that its writer learnt later."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        for index, size in enumerate(record.shape, at + S_SHAPE):
            words[index] = size
        start = (at + S_TEXT) * WORD + len(record.name.text)
        self._file[start : start + len(record.dtype)] = record.dtype
        words[at + S_LENGTHS] = len(record.name.text) | len(record.dtype) << 16 | len(record.shape) << 32

    def disown(self, slot: int) -> None:
        """Frees the name of a slot that is still being written: another slot may take it, nobody finds this one."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        self.unlink(slot)
        words[at + S_HASH] ^= (1 << 64) - 1  # of no key: a key's text fixes its digest
        self.link(slot)

    def link(self, slot: int) -> None:
        """Makes the slot findable by its name."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        bucket = self._buckets + (words[at + S_HASH] & self._bucket_mask)
        words[at + S_CHAIN] = words[bucket]
        words[bucket] = slot

    def unlink(self, slot: int) -> None:
        words, table = self._words, self._table
        at = table + slot * SLOT_WORDS
        link = self._buckets + (words[at + S_HASH] & self._bucket_mask)
        while words[link] != slot:
            assert words[link], "a linked slot is in its bucket"
            link = table + words[link] * SLOT_WORDS + S_CHAIN
        words[link] = words[at + S_CHAIN]

    def free(self, slot: int) -> None:
        """Returns an unlinked slot to the free list."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        words[at + S_STATE] = FREE
        words[at + S_CHAIN] = words[H_FREE]
        words[H_FREE] = slot

    def key(self, slot: int) -> str:
        return str(self._key(self._table + slot * SLOT_WORDS), "utf-8", "surrogatepass")

    def meta(self, slot: int, key: str) -> FeatureMeta:
        words = self._words
        at = self._table + slot * SLOT_WORDS
        lengths = words[at + S_LENGTHS]
        start = (at + S_TEXT) * WORD + (lengths & 0xFFFF)
        return FeatureMeta(
            key=key,
            shape=tuple(words[at + S_SHAPE : at + S_SHAPE + (lengths >> 32)]),
            dtype=str(self._file[start : start + (lengths >> 16 & 0xFFFF)], "utf-8"),
            nbytes=words[at + S_NBYTES],
            checksum=words[at + S_CHECKSUM] if words[at + S_CHECKED] else None,
        )

    def clear(self) -> None:
        """Forgets every name and free slot; the caller links and frees anew."""
        empty = bytes((self._bucket_mask + 1) * WORD)
        self._file[self._buckets * WORD : self._buckets * WORD + len(empty)] = empty
        self._words[H_FREE] = 0
