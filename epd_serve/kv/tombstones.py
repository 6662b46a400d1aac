"""What is over stays known for a while, bounded: late messages about it are answered, not obeyed."""

from __future__ import annotations

from collections import OrderedDict

from epd_serve.wire import TransferKey


class Tombstones:
    """The last `capacity` transfers that ended, each with the reason."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[TransferKey, str] = OrderedDict()

    def add(self, key: TransferKey, reason: str) -> None:
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def get(self, key: TransferKey) -> str | None:
        return self._reasons.get(key)

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._reasons
