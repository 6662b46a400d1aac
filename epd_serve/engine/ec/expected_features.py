"""What encoders are at work on, as far as they have said: for D, which needs no feature and still must not be early.

D's blocks are taken when P can begin to fill them. A request whose features are being made reaches D before they are,
and would hold its blocks for as long as an encoder takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

_MAX_REMEMBERED = 8192


class ExpectedFeatures:
    """Not thread-safe; times are monotonic seconds.

    Args:
        wait_s: how long a feature stays expected after its encoder's last word about it.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._until: OrderedDict[str, float] = OrderedDict()

    def began(self, keys: Iterable[str], now: float) -> None:
        """An encoder begins to work on these."""
        for key in keys:
            self._until[key] = now + self._wait_s
            self._until.move_to_end(key)
        while len(self._until) > _MAX_REMEMBERED:
            self._until.popitem(last=False)

    def renew(self, keys: Iterable[str], now: float) -> None:
        """An encoder still holds these. What has ended may be on its way to a second tier: it is expected no more."""
        for key in keys:
            if key in self._until:
                self._until[key] = now + self._wait_s

    def ended(self, key: str) -> bool:
        """It can be had, or will not come. Whether it was expected until now."""
        return self._until.pop(key, None) is not None

    def expects(self, key: str, now: float) -> bool:
        """Whether an encoder is making it, and has not fallen silent."""
        return self._until.get(key, 0.0) > now
