"""Room in an arena that something else fills: a fetch from another host, a device. What `Arena.reserve` hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.checksum import Bytes
from store.feature import FeatureMeta

if TYPE_CHECKING:
    from store.arena import Arena
    from store.lease import Lease


class Room:
    """Ends with `commit` or `abandon`; a process that dies before leaves nothing readable, and the room is taken back.

    Attributes:
        key: the feature it is for.
        data: the bytes to fill, writable; they stay mapped while this is referenced.
        nbytes: their number.
        offset: where they lie in `Arena.memory`.
        address: where they lie in this process.
    """

    __slots__ = ("_arena", "_detached", "_ended", "_life", "_slot", "address", "data", "key", "nbytes", "offset")

    def __init__(self, arena: Arena, life: object, slot: int, offset: int, key: str, data: Bytes) -> None:
        """For `Arena` only."""
        self._arena = arena
        self._life = life
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
            StoreError: `meta` is of another key or size, or the room has ended.
        """
        return self._arena._commit_room(self, meta)

    def abandon(self) -> None:
        """Gives the room back. Only when nothing writes to it any more. Any number of calls; none after `commit`."""
        self._arena._abandon_room(self)

    def detach(self) -> None:
        """Lets others store the key elsewhere, while a write that cannot be stopped may still land here.

        The room stays taken until `abandon`, and can no longer be committed.
        """
        self._arena._detach_room(self)
