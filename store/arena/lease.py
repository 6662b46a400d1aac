"""One pin on one feature of an arena: what `Arena.lease` hands out."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from store.errors import StoreError
from store.feature import FeatureMeta


class LeaseOwner(Protocol):
    """What a lease needs of the arena that handed it out."""

    def view(self, offset: int, nbytes: int) -> memoryview: ...

    def _release(self, lease: Lease) -> None: ...


class Lease:
    """While it lasts, in this process or its death, the feature is neither evicted nor overwritten.

    Attributes:
        meta: the feature.
        slot, offset: where it lies, for `Arena.copy_pinned` in *another* process that has attached the same arena.
        nbytes: its size.
    """

    __slots__ = ("_arena", "_incarnation", "_released", "meta", "nbytes", "offset", "slot")

    def __init__(self, arena: LeaseOwner, incarnation: object, slot: int, offset: int, meta: FeatureMeta) -> None:
        """For `Arena` only."""
        self._arena = arena
        self._incarnation = incarnation
        self.slot = slot
        self._released = False
        self.meta = meta
        self.offset = offset
        self.nbytes = meta.nbytes

    def view(self) -> memoryview:
        """The bytes, read-only and uncopied. Neither it nor what is made from it may be read after `release`.

        Raises:
            StoreError: the lease has ended.
        """
        if self._released:
            raise StoreError(f"lease on {self.meta.key}: already released")
        return self._arena.view(self.offset, self.nbytes)

    def release(self) -> None:
        """Ends the pin. Any number of calls, from any thread; in a forked child it does nothing.

        Raises:
            StoreError: the arena's lock was not had in time; the pin stays, and another call may end it.
        """
        if not self._released:
            self._arena._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
