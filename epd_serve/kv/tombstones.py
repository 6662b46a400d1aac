"""What is over stays known for a while, bounded: late messages about it are answered, not obeyed."""

from __future__ import annotations

from collections import OrderedDict

from epd_serve.wire import TransferKey


class Tombstones:
    """The last `capacity` transfers that ended, each with the reason, and with P's first token where there was one."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[TransferKey, tuple[str, int | None]] = OrderedDict()

    def add(self, key: TransferKey, reason: str, token: int | None = None) -> None:
        self._ends[key] = (reason, token)
        self._ends.move_to_end(key)
        if len(self._ends) > self._capacity:
            self._ends.popitem(last=False)

    def get(self, key: TransferKey) -> str | None:
        """The reason, or None for a transfer that is not known to have ended."""
        return self._ends[key][0] if key in self._ends else None

    def token(self, key: TransferKey) -> int | None:
        return self._ends[key][1] if key in self._ends else None

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._ends
