"""What is known about a stored feature besides its bytes, and about a store as a whole. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeatureMeta:
    """One stored feature.

    Attributes:
        key: its name (`store.keys.feature_key`).
        shape: dimensions as the writer gave them, e.g. `(num_tokens, hidden)`.
        dtype: element type as the writer named it, e.g. `bfloat16`; the store never interprets it.
        nbytes: size in bytes.
        checksum: xxh3_64 of the bytes, or None when it was stored without one.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    checksum: int | None


@dataclass(frozen=True, slots=True)
class FeatureEntry:
    """A readable feature in a listing.

    Attributes:
        meta: the feature.
        leases: pins of all processes.
        age_s: seconds since it was stored or last used.
    """

    meta: FeatureMeta
    leases: int
    age_s: float


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a whole store (all processes together); those below the blank line only grow.

    Attributes:
        capacity_bytes: room for features.
        used_bytes: taken by features, alignment and writes in progress included.
        features: readable features.
        leased: features that at least one process pins, dropped ones that wait for a release included.

        puts: features stored.
        hits: `lease` and `get_into` that found their feature.
        misses: `lease` and `get_into` that did not.
        evictions: features dropped to make room.
        corrupt: features dropped because their checksum failed.
        reclaimed: half-written features and leases taken back from dead processes.
    """

    capacity_bytes: int
    used_bytes: int
    features: int
    leased: int

    puts: int
    hits: int
    misses: int
    evictions: int
    corrupt: int
    reclaimed: int
