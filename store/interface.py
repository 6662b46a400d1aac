"""What every tier of the MM Store offers. Stages depend on this; `store.arena.Arena` is tier 1 (one host),
`store.mooncake.tier.MooncakeStore` tier 2 (all hosts)."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from store.feature import FeatureMeta, StoreStats

if TYPE_CHECKING:
    from store.checksum import Buffer


class FeatureLease(Protocol):
    """A pin: the feature stays, unchanged, until `release`. Whoever got it releases it (or leaves the `with`)."""

    @property
    def meta(self) -> FeatureMeta: ...

    def view(self) -> memoryview:
        """The bytes, read-only and uncopied. Not to be read after `release`."""

    def release(self) -> None:
        """Ends the pin. Any number of calls."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FeatureStore(Protocol):
    """Features by key. A key names one content for ever, so nothing is ever overwritten."""

    def put(self, key: str, data: Buffer, *, shape: Sequence[int], dtype: str) -> bool:
        """Stores a copy of `data`. True: stored and readable by all. False: it is there, or somebody is writing it.

        Raises:
            StoreFullError: no room without evicting leased features.
            StoreError: empty data, a key or shape beyond the limits, or the store does not answer.
        """

    def contains(self, key: str) -> bool:
        """Is the feature readable now? A hint: only a lease keeps it."""

    def lease(self, key: str, *, verify: bool = True) -> FeatureLease | None:
        """Pins the feature and checks its checksum; None when it is missing.

        Raises:
            CorruptFeatureError: the checksum does not match; the feature is dropped.
        """

    def get_into(self, key: str, dest: Buffer, *, verify: bool = True) -> FeatureMeta | None:
        """Copies the feature to the start of `dest`; None when it is missing. `dest` is untouched unless it succeeds.

        Raises:
            CorruptFeatureError: the checksum does not match; the feature is dropped.
            StoreError: `dest` is too small or read-only.
        """

    def remove(self, key: str) -> bool:
        """Makes the feature missing; its space returns with the last lease. False when it was not readable."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Ends all leases of this process and leaves the store. Any number of calls."""
