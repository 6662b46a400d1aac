"""One flight per key: of all requests that want the same thing made, one makes it and the others wait for that.

Owns who leads and who follows, never what flying means. A leader that fails hands over to exactly one follower, and
after `tries` failures all give up together; a leader that leaves (its client did) hands over without a failure. Lives
in one event loop, no locks.

    LEADS --land--> everybody has the result          LEADS --fail, leave--> the next in the queue LEADS
    LEADS --fail for the last time--> everybody has None      follows --leave--> gone
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
TRIES = 2


class _Flight(Generic[T]):
    def __init__(self) -> None:
        self.queue: list[Seat[T]] = []  # the first one leads
        self.failures = 0


class Seat(Generic[T]):
    """One request's place in the flight of one key. Leaving its `with` block gives the place up.

    `result`: what came of it, None as long as nothing did. `settled`: there is nothing more to wait for.
    """

    def __init__(self, flights: SingleFlight[T], key: str, flight: _Flight[T]) -> None:
        self._flights = flights
        self._key = key
        self._flight = flight
        self._moved = asyncio.Event()
        self.settled = False
        self.result: T | None = None

    @property
    def leads(self) -> bool:
        return not self.settled and self._flight.queue[0] is self

    async def turn(self, handed_over: Callable[[], None] = lambda: None) -> bool:
        """Wait until this seat leads (True) or all is settled (False). `handed_over`: called when another one leads."""
        while not self.settled and not self.leads:
            self._moved.clear()
            await self._moved.wait()
            if not self.settled:
                handed_over()
        return not self.settled

    def land(self, result: T) -> None:
        """The leader has it: so has everybody. One that has left has it for itself."""
        assert self.leads or self.settled, "only the leader lands"
        if self.settled:
            self.result = result
        else:
            self._flights._end(self._key, self._flight, result)

    def fail(self) -> None:
        """The leader could not make it: one follower tries, or all give up."""
        assert self.leads, "only the leader fails"
        self._flight.failures += 1
        if self._flight.failures >= self._flights.tries:
            self._flights._end(self._key, self._flight, None)
        else:
            self.leave()

    def leave(self) -> None:
        """Give the place up; a leader's goes to the next in the queue. Any number of calls."""
        if self.settled:
            return
        led = self.leads
        self._settle(None)
        self._flight.queue.remove(self)
        if not self._flight.queue:
            self._flights._end(self._key, self._flight, None)
        elif led:
            for seat in self._flight.queue:
                seat._moved.set()

    def _settle(self, result: T | None) -> None:
        self.settled, self.result = True, result
        self._moved.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class SingleFlight(Generic[T]):
    """The flights under way. `tries`: how many leaders may fail before all of a flight give up."""

    def __init__(self, *, tries: int = TRIES) -> None:
        self.tries = tries
        self._flights: dict[str, _Flight[T]] = {}

    def join(self, key: str) -> Seat[T]:
        """A place in the flight of `key`; the first one leads."""
        flight = self._flights.setdefault(key, _Flight())
        seat = Seat(self, key, flight)
        flight.queue.append(seat)
        return seat

    def __contains__(self, key: str) -> bool:
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    def _end(self, key: str, flight: _Flight[T], result: T | None) -> None:
        for seat in flight.queue:
            seat._settle(result)
        flight.queue.clear()
        assert self._flights.pop(key) is flight, "one flight per key"
