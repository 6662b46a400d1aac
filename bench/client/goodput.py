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
        lowest_rps, highest_rps: rates beyond which nothing is tried.
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
        self._target, self._tolerance, self._repeats = target, tolerance, repeats
        self._lowest = start_rps / 64 if lowest_rps is None else lowest_rps
        self._highest = start_rps * 64 if highest_rps is None else highest_rps
        self._probed: dict[float, Probed] = {}
        self._rate = min(max(start_rps, self._lowest), self._highest)

    @property
    def probed(self) -> list[Probed]:
        """By rate."""
        return [self._probed[rate] for rate in sorted(self._probed)]

    def next(self) -> float | None:
        """The rate to probe; None when the search is over."""
        now = self._probed.get(self._rate)
        if now is None or self._undecided(now):
            return self._rate
        met, missed = self._bracket()
        if met is None and missed is not None:
            rate = max(missed / 2, self._lowest)
        elif missed is None and met is not None:
            rate = min(met * 2, self._highest)
        else:
            assert met is not None and missed is not None
            if missed <= met * (1 + self._tolerance):
                return None
            rate = (met + missed) / 2
        if rate in self._probed:
            return None
        self._rate = rate
        return rate

    def told(self, rate_rps: float, attained: int, about: int, *, steady: bool = True) -> None:
        """What a probe at that rate found."""
        probed = self._probed.setdefault(rate_rps, Probed(rate_rps))
        probed.attained += attained
        probed.about += about
        probed.runs += 1
        probed.steady = probed.steady and steady

    def found(self) -> Goodput:
        """As far as the search has come."""
        met, missed = self._bracket()
        sure = all(self._decided(self._probed[rate]) for rate in (met, missed) if rate is not None)
        return Goodput(met or 0.0, missed, sure and bool(self._probed))

    def _bracket(self) -> tuple[float | None, float | None]:
        """The lowest rate that misses, and the highest below it that meets the target."""
        missed = min((rate for rate, probed in self._probed.items() if not self._meets(probed)), default=None)
        met = max(
            (
                rate
                for rate, probed in self._probed.items()
                if self._meets(probed) and (missed is None or rate < missed)
            ),
            default=None,
        )
        return met, missed

    def _meets(self, probed: Probed) -> bool:
        return probed.steady and probed.attainment >= self._target

    def _decided(self, probed: Probed) -> bool:
        low, high = wilson(probed.attained, probed.about)
        return not probed.steady or low >= self._target or high < self._target

    def _undecided(self, probed: Probed) -> bool:
        return probed.runs < self._repeats and not self._decided(probed)
