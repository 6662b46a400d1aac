"""Order statistics of small samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """A sample as it is reported: the median, and the quartiles between which half of it lies."""

    median: float
    p25: float
    p75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(float(np.median(values)), percentile(values, 25), percentile(values, 75))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.p25:{spec}}–{self.p75:{spec}})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank). Not of an empty sample."""
    assert len(values) and 0 < percent <= 100
    return float(np.percentile(values, percent, method="inverted_cdf"))
