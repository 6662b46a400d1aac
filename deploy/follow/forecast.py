"""How much will come: Holt's level and slope of what came (ModServe §4.2 has it per stage and every 5 minutes). Pure.

Counts of arrivals are forecast by their square root, which is about as uncertain for few as for many: one standard
deviation is a half (Anscombe). What is reckoned with is what nine windows in ten stay below.
"""

from __future__ import annotations

import math

from deploy.follow.types import Trend

LEVEL, SLOPE = 0.5, 0.1
"""How much of what is new the level and the slope take up."""
NINE_IN_TEN = 0.65
"""Beside the square root: 1.28 standard deviations of a half."""
HARDLY_EVER = 1.16
"""2.33 of them: one in a hundred is less."""
NEVER = 1.75
"""3.5 of them: one in four thousand is less, of as many windows as come in hours."""
FEW = 20.0
"""Requests in a window; of fewer a slope is chance."""
LEAST = math.sqrt(3 / 8)


def followed(trend: Trend | None, count: float) -> Trend:
    """The trend once that many have come in one more window; windows may overlap."""
    root = math.sqrt(count + 3 / 8)
    if trend is None:
        return Trend(root, 0.0)
    level = LEVEL * root + (1 - LEVEL) * (trend.level + trend.slope)
    slope = SLOPE * (level - trend.level) + (1 - SLOPE) * trend.slope
    return Trend(max(level, LEAST), slope)


def usual(trend: Trend) -> float:
    """Requests in a window, chance evened out."""
    return max(0.0, trend.level**2 - 3 / 8)


def upper(trend: Trend, steps: float) -> float:
    """Requests in a window, so many calls of `followed` from now, that are rarely exceeded; 0 after a long silence."""
    if trend.level <= LEAST + 1e-3:
        return 0.0
    slope = trend.slope if trend.level**2 >= FEW else 0.0
    return max(0.0, trend.level + slope * steps + NINE_IN_TEN) ** 2


def above(trend: Trend, count: float) -> bool:
    """Whether more came in a window than in nine such windows in ten, by the trend before it."""
    return math.sqrt(count + 3 / 8) > trend.level + NINE_IN_TEN


def surely(count: float, margin: float = NINE_IN_TEN) -> float:
    """Requests in a window of which so many came, that come in nine such windows in ten, or more; with `HARDLY_EVER` in
    99 of 100, with `NEVER` in all that there will be."""
    return max(0.0, math.sqrt(count + 3 / 8) - margin) ** 2
