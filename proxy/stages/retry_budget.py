"""How many attempts may be repeated over the whole proxy: a token bucket that requests fill (Finagle's retry budget).

Without it an outage multiplies its own load: every request would be tried several times just when least can be served.
Pure: time comes in.
"""

from __future__ import annotations

from proxy.config.limits import RetryLimits


class RetryBudget:
    """Full at first. Every request puts in `limits.ratio`, every second `limits.floor_per_s`; a retry takes 1."""

    def __init__(self, limits: RetryLimits, *, now: float) -> None:
        self._limits = limits
        self._tokens = float(limits.burst)
        self._filled_at = now

    def left(self, now: float) -> float:
        """Retries that may be made now."""
        self._add(self._limits.floor_per_s * max(0.0, now - self._filled_at))
        self._filled_at = max(now, self._filled_at)
        return self._tokens

    def deposit(self) -> None:
        """A request was admitted."""
        self._add(self._limits.ratio)

    def withdraw(self, now: float) -> bool:
        """Pay for a retry. False: there is none to be had, the failure is the answer."""
        if self.left(now) < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _add(self, tokens: float) -> None:
        self._tokens = min(float(self._limits.burst), self._tokens + tokens)
