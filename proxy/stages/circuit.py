"""The circuit breaker of one incarnation of one instance. Pure: time comes in, nothing waits.

    CLOSED --failures in a row--> OPEN --its time has passed--> HALF_OPEN --the probe succeeds--> CLOSED
                                    ^------------------------------ the probe fails, and the time doubles

Owns when an instance is suspended. Leaves to the policies what that means: others are preferred. A call that was
cancelled, or that failed for another instance's sake, has no verdict and moves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True)
class CircuitLimits:
    """When a circuit opens and for how long.

    Attributes:
        failures: failed calls in a row that open it.
        open_s: how long it stays open at first; doubles with every failed probe, up to `open_max_s`.
    """

    failures: int = 5
    open_s: float = 2.0
    open_max_s: float = 30.0


class Circuit:
    """`random`: a number from 0 to 1; spreads the probes of instances that failed together."""

    def __init__(self, limits: CircuitLimits | None = None, *, random: Callable[[], float] = random.random) -> None:
        self._limits = limits or CircuitLimits()
        self._random = random
        self._failures = 0
        self._open_until: float | None = None
        self._open_s = self._limits.open_s
        self._probe: object | None = None

    def state(self, now: float) -> State:
        if self._open_until is None:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def suspended(self, now: float) -> bool:
        """Nothing more should be sent there now: it is open, or half-open with its probe under way."""
        state = self.state(now)
        return state is State.OPEN or (state is State.HALF_OPEN and self._probe is not None)

    def open_for_s(self, now: float) -> float:
        """How much longer it stays open."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def began(self, call: object, now: float) -> None:
        """`call` goes to the instance. The first one of a half-open circuit is its probe."""
        if self.state(now) is State.HALF_OPEN and self._probe is None:
            self._probe = call

    def ended(self, call: object) -> None:
        """`call` is over, with or without a verdict before. Any number of times."""
        if self._probe is call:
            self._probe = None

    def succeeded(self) -> None:
        """The instance did its work: whatever went before is forgiven."""
        self._failures = 0
        self._open_until = None
        self._open_s = self._limits.open_s

    def failed(self, now: float) -> bool:
        """The instance failed a call. True when that opened the circuit."""
        self._failures += 1
        state = self.state(now)
        if state is State.OPEN or (state is State.CLOSED and self._failures < self._limits.failures):
            return False
        if state is State.HALF_OPEN:
            self._open_s = min(2 * self._open_s, self._limits.open_max_s)
        self._open_until = now + self._open_s * (0.75 + 0.5 * self._random())
        return True
