"""Goodput: the highest rate at which a share of the requests attains the objective. The search is pure.

A probe's attainment is a sample, so a rate counts as decided when Wilson's interval lies on one side of the target;
until then it is probed again and the counts are pooled, `repeats` times at most. A rate at which more and more requests
wait is a miss however short the run was: nobody could keep it up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE_Z = 1.645
"""Of the interval: 90 % between both sides."""


@dataclass(slots=True)
class Probed:
    """A rate, and what all its probes found together."""

    rate_rps: float
    attained: int = 0
    about: int = 0
    runs: int = 0
    steady: bool = True

    @property
    def attainment(self) -> float:
        return self.attained / self.about if self.about else 0.0

    def meets(self, target: float) -> bool:
        return self.steady and self.attainment >= target

    def decided(self, target: float) -> bool:
        low, high = wilson(self.attained, self.about)
        return not self.steady or low >= target or high < target


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a search found.

    Attributes:
        rate_rps: the highest rate that meets the target; 0 where none does.
        missed_rps: the lowest that does not; None where even the highest allowed one meets it.
        sure: both are decided beyond chance.
    """

    rate_rps: float
    missed_rps: float | None
    sure: bool


def wilson(attained: int, about: int, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """The interval of a share (E. B. Wilson, 1927). (0, 1) of nothing."""
    if not about:
        return 0.0, 1.0
    share, scale = attained / about, z * z / about
    middle = (share + scale / 2) / (1 + scale)
    half = z / (1 + scale) * math.sqrt(share * (1 - share) / about + scale / (4 * about))
    return max(0.0, middle - half), min(1.0, middle + half)


class Search:
    """Doubles or halves from `start_rps` until one rate meets the target and one does not, then halves between them.

    Args:
        target: share of requests that is to attain the objective.
        tolerance: the search ends when the missed rate is at most so much above the met one, as a share of it.
        lowest_rps, highest_rps: rates beyond which nothing is tried; by default 64 times below and above the start.
        repeats: probes of one rate, at most.
    """

    def __init__(
        self,
        target: float,
        start_rps: float,
        *,
        tolerance: float = 0.1,
        lowest_rps: float | None = None,
        highest_rps: float | None = None,
        repeats: int = 3,
    ) -> None:
        assert 0 < target <= 1 and start_rps > 0 and tolerance > 0 and repeats > 0
        self.target, self._tolerance, self._repeats = target, tolerance, repeats
        self._lowest, self._highest = lowest_rps or start_rps / 64, highest_rps or start_rps * 64
        self._probed: dict[float, Probed] = {}
        self._rate = min(max(start_rps, self._lowest), self._highest)

    @property
    def probed(self) -> list[Probed]:
        """By rate."""
        return [self._probed[rate] for rate in sorted(self._probed)]

    def next(self) -> float | None:
        """The rate to probe; None when the search is over."""
        now = self._probed.get(self._rate)
        if now is None or (now.runs < self._repeats and not now.decided(self.target)):
            return self._rate
        met, missed = self._bracket()
        if missed is None:
            rate = min((met or 0.0) * 2, self._highest)
        elif met is None:
            rate = max(missed / 2, self._lowest)
        elif missed <= met * (1 + self._tolerance):
            return None
        else:
            rate = (met + missed) / 2
        if rate in self._probed:
            return None
        self._rate = rate
        return rate

    def add(self, rate_rps: float, attained: int, about: int, *, steady: bool = True) -> None:
        """What a probe at that rate found."""
        probed = self._probed.setdefault(rate_rps, Probed(rate_rps))
        probed.attained += attained
        probed.about += about
        probed.runs += 1
        probed.steady = probed.steady and steady

    def result(self) -> Goodput:
        """As far as the search has come."""
        met, missed = self._bracket()
        sure = all(self._probed[rate].decided(self.target) for rate in (met, missed) if rate is not None)
        return Goodput(met or 0.0, missed, sure and bool(self._probed))

    def _bracket(self) -> tuple[float | None, float | None]:
        """The highest rate that meets the target below the lowest that misses, and that one."""
        missed = min((one.rate_rps for one in self.probed if not one.meets(self.target)), default=None)
        below = [one.rate_rps for one in self.probed if missed is None or one.rate_rps < missed]
        return max(below, default=None), missed
