"""How long either side of a transfer holds something for the other without hearing of it. Pure.

A process that was stopped (SIGSTOP, a suspended machine) heard nothing meanwhile, and that says nothing about its peer:
of the time between two looks no more than `STALL_S` counts.
"""

from __future__ import annotations

from epd_serve.wire import TransferKey

STALL_S = 2.0  # looks come twice a second; a machine under load delays them


class Leases:
    """Deadlines by transfer, `until`. The owner says when one begins, what renews it and when it ends."""

    def __init__(self) -> None:
        self.until: dict[TransferKey, float] = {}
        self._looked: float | None = None

    def grant(self, key: TransferKey, until: float) -> None:
        """Begin or renew."""
        self.until[key] = until

    def extend(self, key: TransferKey, by_s: float) -> None:
        self.until[key] += by_s

    def end(self, key: TransferKey) -> None:
        self.until.pop(key, None)

    def lapsed(self, now: float) -> list[TransferKey]:
        """Whose time is up. To be asked regularly, also when nobody's is; says the same again until they are ended."""
        slept = 0.0 if self._looked is None else max(0.0, now - self._looked - STALL_S)
        self._looked = now
        if slept:
            self.until = {key: until + slept for key, until in self.until.items()}
        return [key for key, until in self.until.items() if until <= now]
