"""What one API key may ask of the proxy at once and per minute, so that no key can take it from the others.

Owns the counts. Bounds over all clients together are admission's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from epd_serve.errors import OverloadedError
from proxy.config.limits import KeyLimits

PRUNE_FROM = 1024
UNLIMITED = nullcontext()


class KeyLimitError(OverloadedError):
    """This key has used up what it may: 429, and others are not concerned."""

    code = "rate_limit_exceeded"


class KeyGate:
    """Counts requests per account (`proxy.tenants.auth.Caller`), whose limits may change. In one event loop; holds
    accounts only while they matter.

    Requests per minute are a bucket of that many, refilled evenly: short bursts pass, the average is bounded.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight: dict[str, int] = {}
        self._full_at: dict[str, float] = {}  # when the account's bucket will be full again
        self._prune_at = PRUNE_FROM

    def admitted(self, account: str, limits: KeyLimits) -> AbstractContextManager[None]:
        """Count one request of `account` while it lasts. Entering raises KeyLimitError (429) with the time to wait."""
        limited = limits.requests_in_flight or limits.requests_per_minute
        return self._counted(account, limits) if limited else UNLIMITED

    @contextmanager
    def _counted(self, account: str, limits: KeyLimits) -> Iterator[None]:
        most = limits.requests_in_flight
        running = self._in_flight.get(account, 0)
        if most and running >= most:
            raise KeyLimitError(f"this key has {running} requests in progress, its limit is {most}; try again later")
        self._take(account, limits.requests_per_minute)
        if not most:
            yield
            return
        self._in_flight[account] = running + 1
        try:
            yield
        finally:
            left = self._in_flight[account] - 1
            if left:
                self._in_flight[account] = left
            else:
                del self._in_flight[account]

    def _take(self, account: str, per_minute: int) -> None:
        if not per_minute:
            return
        now = self._clock()
        full_at = max(self._full_at.get(account, now), now) + 60.0 / per_minute
        if full_at > now + 60.0 + 1e-6:
            raise KeyLimitError(
                f"this key has made its {per_minute} requests per minute; try again later",
                retry_after_s=full_at - now - 60.0,
            )
        self._full_at[account] = full_at
        if len(self._full_at) > self._prune_at:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
            self._prune_at = max(PRUNE_FROM, 2 * len(self._full_at))
