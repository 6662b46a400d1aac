"""Order statistics of small samples."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank). Not of an empty sample."""
    assert values and 0 < percent <= 100
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]
