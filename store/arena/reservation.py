"""Room in an arena that something else fills, a fetch from another host or a device: what `Arena.reserve` hands out."""

from __future__ import annotations

from typing import Protocol

from store.arena.lease import Lease
from store.checksum import Bytes
from store.feature import FeatureMeta


class ReservationOwner(Protocol):
    """What a reservation needs of the arena that handed it out."""

    def _commit(self, reservation: Reservation, meta: FeatureMeta) -> Lease: ...

    def _abandon(self, reservation: Reservation) -> None: ...

    def _detach(self, reservation: Reservation) -> None: ...


class Reservation:
    """Ends with `commit` or `abandon`; a process that dies before leaves nothing readable, and the room is taken back.

    Attributes:
        key: the feature it is for.
        data: the bytes to fill, writable; they stay mapped while this is referenced.
        nbytes: their number.
        offset: where they lie in `Arena.memory`.
        address: where they lie in this process.
    """

    __slots__ = ("_arena", "_detached", "_ended", "_incarnation", "_slot", "address", "data", "key", "nbytes", "offset")

    def __init__(
        self, arena: ReservationOwner, incarnation: object, slot: int, offset: int, key: str, data: Bytes
    ) -> None:
        """For `Arena` only."""
        self._arena = arena
        self._incarnation = incarnation
        self._slot = slot
        self._ended = False
        self._detached = False
        self.key = key
        self.data = data
        self.nbytes = data.nbytes
        self.offset = offset
        self.address: int = data.ctypes.data

    def commit(self, meta: FeatureMeta) -> Lease:
        """The bytes are complete: readable by all from now on, and leased by the caller.

        Raises:
            StoreError: `meta` is of another key or size, or the reservation has ended.
        """
        return self._arena._commit(self, meta)

    def abandon(self) -> None:
        """Gives the room back. Only when nothing writes to it any more. Any number of calls; none after `commit`."""
        self._arena._abandon(self)

    def detach(self) -> None:
        """Lets others store the key elsewhere, while a write that cannot be stopped may still land here.

        The room stays taken until `abandon`, and can no longer be committed.
        """
        self._arena._detach(self)
