"""A line y = a + b·x learnt while it is used: bytes → seconds of a packet, tokens of a step → seconds of a layer. Pure.

Both are measured on machines that do other things too, so three choices differ from the textbook's least squares.
Errors count relative to the line: a large packet's noise is more than all of a small packet, which alone shows `a`.
Values far above the line count by the error's size, not its square: one stall moves the line little, and a link that
has really become slower is followed once most of the recent values say so. And where all x are alike they cannot tell
a from b: the last line that was told apart, at first the prior, is scaled until it passes through them. The first
value already counts that way: a prior can be wrong by orders of magnitude.
"""

from __future__ import annotations

import math
from collections import deque

FORGETTING = 0.95  # a value's weight after n more values is 0.95ⁿ: the last 20 or so make the line
WINDOW = 64  # values kept; the oldest one's weight is 4 %
ENOUGH = 3  # values, before which they do not tell a from b either
_SPREAD = 0.01  # least relative variance of x that tells a from b: a standard deviation of a tenth of the mean
_TINY_S = 1e-9  # keeps weights finite where everything took no time


class LineFit:
    """Weighted least squares over recent values, a ≥ 0 and b ≥ 0. Not thread-safe: it belongs to who observes.

    Args:
        a, b: the prior line, at least one of them positive.
    """

    def __init__(self, a: float, b: float) -> None:
        assert a >= 0 and b >= 0 and a + b > 0
        self.a, self.b = a, b
        self._shape = a, b
        self._values: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def at(self, x: float) -> float:
        return self.a + self.b * x

    def observe(self, x: float, y: float) -> None:
        """One measured pair, both finite and not negative. About 30 µs."""
        assert 0 <= x < math.inf and 0 <= y < math.inf, (x, y)
        self._values.append((x, y))
        self.a, self.b = self._line()

    def _line(self) -> tuple[float, float]:
        sum_w = sum_x = sum_y = sum_xx = sum_xy = 0.0
        age = 1.0
        for x, y in reversed(self._values):
            line = max(self.a + self.b * x, _TINY_S)
            w = age / (line * max(line, y))
            sum_w += w
            sum_x += w * x
            sum_y += w * y
            sum_xx += w * x * x
            sum_xy += w * x * y
            age *= FORGETTING
        determinant = sum_w * sum_xx - sum_x * sum_x
        if len(self._values) < ENOUGH or determinant <= _SPREAD * sum_x * sum_x:
            a, b = self._shape
            height = a * sum_w + b * sum_x
            # a line of slope alone cannot be scaled to values at x = 0
            return (a * sum_y / height, b * sum_y / height) if height > 0 else (sum_y / sum_w, 0.0)
        b = (sum_w * sum_xy - sum_x * sum_y) / determinant
        a = (sum_y - b * sum_x) / sum_w
        # At most one of them is negative, as no x and no y is. The best of the allowed lines then has it at 0.
        if b < 0:
            a, b = sum_y / sum_w, 0.0
        elif a < 0:
            a, b = 0.0, sum_xy / sum_xx
        if a + b > 0:
            self._shape = a, b
        return a, b
