"""How many bytes of request bodies and media this process holds at once: one account book, whoever holds them.

Bytes are counted before they are held, as they come, and given back when they go; never by what was announced, since
announcing is free. What is counted, and when, `docs/guides/overload.md` has as a formula ("Memory of the front door").
"""

from __future__ import annotations

from typing import Self

from epd_serve.errors import PayloadTooLargeError
from proxy.errors import BusyError
from proxy.tenants.fair_share import FairShare, NoRoom, OverShare
from proxy.tenants.key_limits import KeyLimitError


class MemoryReservation:
    """What one request holds, until the context that it is ends. From `MemoryBudget.request`."""

    def __init__(self, share: FairShare, account: str) -> None:
        self._share = share
        self.account = account
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(self.size_bytes)

    def take(self, more_bytes: int) -> None:
        """So many more are about to be held.

        Raises:
            PayloadTooLargeError: 413, the request could never be held. BusyError: 503, not now.
            KeyLimitError: 429, not now, because of what else its account has here.
        """
        if self.size_bytes + more_bytes > self._share.most:
            raise PayloadTooLargeError(
                f"The request would take more than {self._share.most:,} bytes of this server's memory "
                "(memory.process_bytes), which no request may.",
                code="request_too_large",
            )
        try:
            self._share.take(self.account, more_bytes)
        except NoRoom:
            raise BusyError(
                f"the requests in progress hold all of the {self._share.limit:,} bytes that they may; try again later",
                code="memory_full",
            ) from None
        except OverShare:
            held = self._share.held_by(self.account)
            raise KeyLimitError(
                f"the requests of this account in progress hold {held:,} bytes, which is its share; try again later",
                retry_after_s=2.0,
            ) from None
        self.size_bytes += more_bytes

    def give_back(self, less_bytes: int) -> None:
        """So many are held no more."""
        assert less_bytes <= self.size_bytes, "more is given back than was taken"
        self.size_bytes -= less_bytes
        self._share.give_back(self.account, less_bytes)

    def handed_over(self) -> MemoryReservation:
        """All of it, for what outlives the request. This one holds nothing then."""
        other = MemoryReservation(self._share, self.account)
        other.size_bytes, self.size_bytes = self.size_bytes, 0
        return other


class MemoryBudget:
    """The bytes that one process may hold, for one event loop."""

    def __init__(self, limit_bytes: int, *, apart: bool) -> None:
        """`apart`: accounts are told apart, so that none of them gets everything (`proxy/tenants/fair_share.py`)."""
        self._share = FairShare(limit_bytes, apart=apart)

    @property
    def held_bytes(self) -> int:
        """Bytes that all requests hold now."""
        return self._share.held

    def request(self, account: str) -> MemoryReservation:
        """Returns the empty reservation of a request of `account`."""
        return MemoryReservation(self._share, account)
