"""Reads the counters in an arena's header."""

from __future__ import annotations

from store.arena_layout import (
    H_CAPACITY,
    H_CORRUPT,
    H_EVICTIONS,
    H_FEATURES,
    H_HITS,
    H_LEASED,
    H_MISSES,
    H_PUTS,
    H_RECLAIMED,
    H_USED,
)
from store.feature import StoreStats


def read_stats(words: memoryview) -> StoreStats:
    """The caller holds the arena's lock, so that the counters agree with each other."""
    return StoreStats(
        capacity_bytes=words[H_CAPACITY],
        used_bytes=words[H_USED],
        features=words[H_FEATURES],
        leased=words[H_LEASED],
        puts=words[H_PUTS],
        hits=words[H_HITS],
        misses=words[H_MISSES],
        evictions=words[H_EVICTIONS],
        corrupt=words[H_CORRUPT],
        reclaimed=words[H_RECLAIMED],
    )
