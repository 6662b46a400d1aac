"""How fast each encoder is, learnt from this proxy's own calls: for those that do not report it themselves.

Speed is work done per second of time in which there was work. A call's own duration would not do: calls to one encoder
wait for each other there. Lives in one event loop; the clock is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from epd_serve.instances import IncarnationId

HORIZON_S = 10.0
"""Busy seconds after which what was learnt begins to be forgotten."""

ENOUGH_S = 0.05
"""Busy seconds before which nothing is believed: the first calls are slow for reasons of their own."""

MAX_INCARNATIONS = 1024


@dataclass
class _Account:
    open: int = 0
    since: float = 0.0
    done: float = 0.0
    busy_s: float = 0.0

    def settle(self, now: float) -> None:
        if self.open:
            self.busy_s += now - self.since
        self.since = now

    def fade(self) -> None:
        if self.busy_s > HORIZON_S:
            self.busy_s, self.done = self.busy_s / 2, self.done / 2


class LearntSpeeds:
    """Rates by incarnation, in work per second; the least recently begun incarnations are forgotten beyond
    `MAX_INCARNATIONS`."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[IncarnationId, _Account] = OrderedDict()

    def begin(self, incarnation_id: IncarnationId, now: float) -> None:
        """A call to `incarnation_id` begins. Every call ends by `end`."""
        account = self._accounts.setdefault(incarnation_id, _Account())
        self._accounts.move_to_end(incarnation_id)
        account.settle(now)
        account.open += 1
        if len(self._accounts) > MAX_INCARNATIONS:
            self._accounts.popitem(last=False)

    def end(self, incarnation_id: IncarnationId, now: float, *, done: float) -> None:
        """A call ends that got `done` done; 0 for one that failed or was left."""
        account = self._accounts.get(incarnation_id)
        if account is not None and account.open:
            account.settle(now)
            account.open -= 1
            account.done += done
            account.fade()  # once its work is counted along with its time

    def rate(self, incarnation_id: IncarnationId) -> float:
        """Work per second, 0 while too little is known."""
        account = self._accounts.get(incarnation_id)
        return account.done / account.busy_s if account is not None and account.busy_s > ENOUGH_S else 0.0
