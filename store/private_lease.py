"""A lease on a private copy: what a tier hands out whose bytes lie elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from store.checksum import Bytes
from store.errors import StoreError
from store.feature import FeatureMeta


class PrivateLease:
    """A `store.interface.FeatureLease`. Its bytes are freed with the last view of them."""

    __slots__ = ("_data", "_released", "meta")

    def __init__(self, meta: FeatureMeta, data: Bytes) -> None:
        self.meta = meta
        self._data = data.data.toreadonly()
        self._released = False

    def view(self) -> memoryview:
        """The bytes, read-only. Raises StoreError after `release`."""
        if self._released:
            raise StoreError(f"lease on {self.meta.key}: already released")
        return self._data

    def release(self) -> None:
        self._released = True
        self._data = memoryview(b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
