"""Named errors of the MM Store. `store` is the lower layer, so the serving layer translates these, not the reverse."""

from __future__ import annotations


class StoreError(Exception):
    """The store cannot do what was asked: not an arena, a wrong size, a lock past its deadline."""


class StoreFullError(StoreError):
    """No room for the feature unless features that somebody leases or is still writing are evicted."""


class CorruptFeatureError(StoreError):
    """A stored feature failed its checksum. Corrupt is not missing: it is counted and dropped, then recomputed."""


class StoreUnavailableError(StoreError):
    """The second tier did not answer in time, or is known not to answer. Nothing is said about the feature."""
