"""How many bytes of request bodies are held at once, over all clients.

A bound on one body and one on how many requests are held do not bound their product. Owns the count; when a body is
read, and until when it is held, is the exchange's business.
"""

from __future__ import annotations

from typing import Self

from epd_serve.errors import OverloadedError


class HeldBody:
    """One request's body as it comes. From `BodyBudget.body`; counts until the context that it is ends."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.held_bytes -= self.size_bytes

    def grow(self, more_bytes: int) -> None:
        """So much more of it has come. Raises OverloadedError (429) where all bodies together are too large now; one
        that is alone always fits."""
        self._budget._take(more_bytes, others_bytes=self._budget.held_bytes - self.size_bytes)
        self.size_bytes += more_bytes


class BodyBudget:
    """In one event loop. Only what has come counts, never what was announced: announcing is free.

    Attributes:
        held_bytes: of all bodies, now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def body(self) -> HeldBody:
        """A body that is about to come."""
        return HeldBody(self)

    def _take(self, more_bytes: int, *, others_bytes: int) -> None:
        if others_bytes and self.held_bytes + more_bytes > self._limit_bytes:
            raise OverloadedError(
                f"the bodies of the requests in progress are as large as they may be, {self._limit_bytes:,} bytes; "
                "try again later"
            )
        self.held_bytes += more_bytes
