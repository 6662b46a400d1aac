"""What a consumer tells vLLM's scheduler about a request: wait, run, or fail. Pure; features are `feature_table.py`'s.

    every feature READY                          RUN
    one still looked for                         WAIT
    one LOST, the request must not recompute     FAIL, once (metadata-only: there are no pixels; or the proxy's policy)
    one LOST, and a recompute slot is free       RUN: decided, vLLM encodes it locally
    one LOST, no slot                            WAIT in line; a feature that comes late is used

A slot comes back when the request has finished, when its prefill has passed the last of its items, or when it needs
none any more.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from epd_serve.engine.ec.feature_item import FeatureState, PinT
from epd_serve.engine.ec.feature_table import FeatureTable
from epd_serve.engine.ec.recompute_slots import RecomputeSlots


class Admission(enum.Enum):
    WAIT = "wait"
    RUN = "run"
    FAIL = "fail"


@dataclass(frozen=True)
class Failure:
    """A request that cannot go on, what it lacks, and why (of several causes, the first)."""

    request: str
    keys: list[str]
    cause: str


class FeatureDesk(Generic[PinT]):
    """Not thread-safe; the owner holds one lock around every call."""

    def __init__(self, table: FeatureTable[PinT], recompute_limit: int) -> None:
        self.table = table
        self.slots = RecomputeSlots(recompute_limit)
        self.counters: Counter[str] = Counter()
        self._decided: set[str] = set()
        self._waits: set[str] = set()  # told to WAIT when it last asked
        self._failed: dict[str, bool] = {}  # request → whether vLLM was told

    def admission(self, request: str, keys: Sequence[str], now: float, *, must_not_recompute: bool) -> Admission:
        """Asked at every step. `keys`: items that its prefill has not passed yet, O(len(keys))."""
        if request in self._failed:
            return Admission.WAIT  # vLLM has been told, or will be at the end of this step
        admission = self._admission(request, keys, now, must_not_recompute=must_not_recompute)
        (self._waits.add if admission is Admission.WAIT else self._waits.discard)(request)
        return admission

    def _admission(self, request: str, keys: Sequence[str], now: float, *, must_not_recompute: bool) -> Admission:
        if request not in self._decided:
            self.table.undecide(request)  # it was preempted after its prefill: what comes now is of use again
        states = {key: self.table.need(request, key, now) for key in keys}
        lost = [key for key, state in states.items() if state is FeatureState.LOST]
        if lost and must_not_recompute:
            self._failed[request] = False
            self.counters[f"failed.{self.table.cause(lost[0])}"] += 1
            return Admission.FAIL
        if len(lost) + sum(state is FeatureState.READY for state in states.values()) < len(states):
            self._needs_no_slot(request)
            return Admission.WAIT
        if not lost:
            self._needs_no_slot(request)
            return Admission.RUN
        if not self.slots.claim(request):
            return Admission.WAIT
        self.table.decide(request, lost)
        if request not in self._decided:
            self._decided.add(request)
            self.counters.update(f"recomputed.{self.table.cause(key)}" for key in lost)
        return Admission.RUN

    def failure(self, request: str, keys: Iterable[str]) -> Failure:
        """What to announce for a request that was just answered FAIL."""
        lost = [key for key in dict.fromkeys(keys) if self.table.lost(key)]
        return Failure(request, lost, self.table.cause(lost[0]))

    def take_failed(self) -> set[str]:
        """Requests that vLLM has to fail, each named once."""
        failed = {request for request, told in self._failed.items() if not told}
        self._failed.update(dict.fromkeys(failed, True))
        return failed

    def ended(self, request: str) -> None:
        """vLLM does not know the request any more: it must not be named to it. Its pins stay until `release`."""
        if request in self._failed:
            self._failed[request] = True

    def release(self, requests: Iterable[str]) -> None:
        """No step that needs these requests' features can be running any more."""
        requests = list(requests)
        for request in requests:
            self._failed.pop(request, None)
            self._waits.discard(request)
            self._needs_no_slot(request)
        self.table.release(requests)

    def passed(self, request: str) -> None:
        """The request's prefill has all its items behind it, or a prefix cache has them all while it waits."""
        if request in self._decided:
            self._decided.discard(request)
            self.slots.give_back(request)
        elif request in self._waits:  # it would get a slot that it never gives back before its end
            self._waits.discard(request)
            self.slots.give_back(request)
            self.table.forgo(request)

    def waiting(self) -> bool:
        """Whether a request waits for a feature or a slot."""
        return bool(self.slots.standing or self.table.wanted())

    def _needs_no_slot(self, request: str) -> None:
        self.slots.give_back(request)
        if request in self._decided:
            self._decided.discard(request)
            self.table.undecide(request)
