"""When a wanted feature is looked up again: here every 50 ms, in the second tier every 500 ms, or when told to hurry.

Pure. Events are hints and may be lost; the store's index is the truth, but asking it over a network costs others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

RELOOK_S = 0.05
RELOOK_REMOTE_S = 0.5
RELOOK_FULL_S = 0.1  # no room in the arena: usually given back sooner, which is told by `hurry`


@dataclass
class _Due:
    local: float = 0.0
    remote: float = 0.0


class Lookups:
    """Not thread-safe: the listener's own. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._due: dict[str, _Due] = {}

    def local_due(self, key: str, now: float) -> bool:
        """True at most every `RELOOK_S` for a key: look now."""
        due = self._due.setdefault(key, _Due())
        if now < due.local:
            return False
        due.local = now + RELOOK_S
        return True

    def remote_due(self, key: str, now: float) -> bool:
        """True at most every `RELOOK_REMOTE_S` for a key: fetch now."""
        due = self._due.setdefault(key, _Due())
        if now < due.remote:
            return False
        due.remote = now + RELOOK_REMOTE_S
        return True

    def hurry(self, key: str, *, remote: bool = False) -> None:
        """Something was heard of this key: it is due."""
        due = self._due.setdefault(key, _Due())
        due.local = 0.0
        if remote:
            due.remote = 0.0

    def put_off(self, key: str, now: float) -> None:
        """There was no room for it: not 500 ms, but not at once either."""
        self._due.setdefault(key, _Due()).remote = now + RELOOK_FULL_S

    def forget_all_but(self, keys: Collection[str]) -> None:
        if len(self._due) > len(keys):
            self._due = {key: due for key, due in self._due.items() if key in keys}
