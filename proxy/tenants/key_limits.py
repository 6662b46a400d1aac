"""What one API key may ask of the proxy at once and per minute, so that no key can take it from the others.

Owns the counts. Bounds over all clients together are admission's.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from epd_serve.errors import OverloadedError
from proxy.config.limits import KeyLimits

UNLIMITED = nullcontext()
MINUTE_S = 60.0


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
        self._in_flight: Counter[str] = Counter()
        self._full_at: OrderedDict[str, float] = OrderedDict()  # when its bucket is full again; the last asked last

    def admitted(self, account: str, limits: KeyLimits) -> AbstractContextManager[None]:
        """Count one request of `account` while it lasts. Entering raises KeyLimitError (429) with the time to wait."""
        limited = limits.requests_in_flight or limits.requests_per_minute
        return self._counted(account, limits) if limited else UNLIMITED

    @contextmanager
    def _counted(self, account: str, limits: KeyLimits) -> Iterator[None]:
        most, running = limits.requests_in_flight, self._in_flight[account]
        if most and running >= most:
            raise KeyLimitError(f"this key has {running} requests in progress, its limit is {most}; try again later")
        if limits.requests_per_minute:
            self._take(account, limits.requests_per_minute)
        self._in_flight[account] += 1
        try:
            yield
        finally:
            self._in_flight[account] -= 1
            if not self._in_flight[account]:
                del self._in_flight[account]

    def _take(self, account: str, per_minute: int) -> None:
        now = self._clock()
        while self._full_at and next(iter(self._full_at.values())) <= now:
            self._full_at.popitem(last=False)
        full_at = max(self._full_at.get(account, now), now) + MINUTE_S / per_minute
        wait_s = full_at - now - MINUTE_S
        if wait_s > 1e-6:
            raise KeyLimitError(
                f"this key has made its {per_minute} requests per minute; try again later", retry_after_s=wait_s
            )
        self._full_at[account] = full_at
        self._full_at.move_to_end(account)
