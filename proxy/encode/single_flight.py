"""One flight per key: of all requests that want the same item encoded, one has it done and the others wait for that.

Owns who leads and who follows, never what flying means. A leader that fails hands over to exactly one follower, and
after `tries` failures all give up together; a leader that leaves (its client did) hands over without a failure. Lives
in one event loop, no locks.

    LEADS --land--> everybody has it                  LEADS --fail, leave--> the next in the queue LEADS
    LEADS --fail for the last time--> nobody has it           follows --leave--> gone
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

TRIES = 2


class SingleFlight(dict[str, "list[Seat]"]):
    """The flights under way: by key the seats of who wants it, of which the first leads.

    Args:
        tries: how many leaders may fail before all of a flight give up.
    """

    def __init__(self, *, tries: int = TRIES) -> None:
        super().__init__()
        self.tries = tries

    def join(self, key: str) -> Seat:
        """A place in the flight of `key`; the first one leads."""
        return Seat(self, key)


class Seat:
    """One request's place in the flight of one key. Leaving its `with` block gives the place up.

    Attributes:
        landed: what was wanted is there.
    """

    def __init__(self, flights: SingleFlight, key: str) -> None:
        self._flights = flights
        self._key = key
        self._seats = flights.setdefault(key, [])  # of the flight; of none once there is nothing to wait for
        self._seats.append(self)
        self._failures = 0  # of all leaders, as the last one knows
        self._moved = asyncio.Event()
        self.landed = False

    @property
    def leads(self) -> bool:
        return bool(self._seats) and self._seats[0] is self

    @property
    def settled(self) -> bool:
        """There is nothing more to wait for."""
        return not self._seats

    async def turn(self, handed_over: Callable[[], None] = lambda: None) -> bool:
        """Wait until this seat leads (True) or all is settled (False). `handed_over`: called when another one leads."""
        while self._seats and not self.leads:
            self._moved.clear()
            await self._moved.wait()
            if self._seats:
                handed_over()
        return self.leads

    def land(self) -> None:
        """Its request has it: so has everybody, if it leads. One that has left has it for itself."""
        self.landed = True
        if self.leads:
            self._end(landed=True)

    def fail(self) -> None:
        """A leader could not make it: one follower tries, or all give up. No matter for one that does not lead."""
        if self.leads:
            self._failures += 1
            if self._failures < self._flights.tries:
                self.leave()
            else:
                self._end(landed=False)

    def leave(self) -> None:
        """Give the place up; a leader's goes to the next in the queue. Any number of calls."""
        seats, led, self._seats = self._seats, self.leads, []
        if seats:
            seats.remove(self)
            if not seats:
                del self._flights[self._key]
            elif led:
                seats[0]._failures = self._failures
                for seat in seats:
                    seat._moved.set()

    def _end(self, *, landed: bool) -> None:
        del self._flights[self._key]
        for seat in self._seats:
            seat._seats, seat.landed = [], landed
            seat._moved.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
