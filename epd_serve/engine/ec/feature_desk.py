"""What a consumer tells vLLM's scheduler about a request: wait, run, or fail. Pure; features are `feature_table.py`'s.

    every feature READY                          RUN
    one still looked for                         WAIT
    one LOST, the request must not recompute     FAIL, once (metadata-only: there are no pixels; or the proxy's policy)
    one LOST, and a recompute slot is free       RUN: decided, vLLM encodes it locally
    one LOST, no slot                            WAIT in line; a feature that comes late is used
    one looked for, but enough there before it    PARTIAL: run up to it, one request at a time

A slot comes back when the request has finished, when its prefill has passed the last of its items, or when it needs
none any more.

Pins are room in the store that an encoder may be waiting for, and no request may wait for room that another one holds
while it waits itself. So when an encoder goes without room for long, pins are given up (`make_room`), except those of
requests that were let run, which vLLM may read at any moment, and those of one that waits:

    the request that is computed in part         else it would hold KV blocks and wait for room for ever
    or the first that vLLM asked for in vain     it has all that it needs but features
    or the first whose features are incomplete   (vLLM has not asked for it: D has not reserved its blocks)

That one gets room for what it lacks, then it runs and lets go, and the next one is that one.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epd_serve.engine.ec.feature_item import FeatureState
from epd_serve.engine.ec.feature_table import PARK_S, FeatureTable


class RecomputeSlots:
    """How many requests recompute lost features at one time: at most `limit` hold a slot, the rest stand in line.

    A slow or dead encoder must not turn every P into an encoder. A request holds at most one slot, however many
    features it lost. Slots go out in the order in which requests first asked.
    """

    def __init__(self, limit: int) -> None:
        assert limit > 0, "without a slot, a request with a lost feature would wait for ever"
        self._limit = limit
        self._line: dict[str, None] = {}  # in order of arrival
        self._holders: set[str] = set()

    @property
    def taken(self) -> int:
        return len(self._holders)

    @property
    def standing(self) -> int:
        """Requests in line."""
        return len(self._line)

    def claim(self, request: str) -> bool:
        """Whether the request has a slot; if not, it stands in line from now on."""
        if request not in self._holders:
            self._line[request] = None
            self._serve_line()
        return request in self._holders

    def give_back(self, request: str) -> bool:
        """The request holds no slot and stands in no line any more. True when that gave somebody else a slot."""
        self._line.pop(request, None)
        self._holders.discard(request)
        return self._serve_line()

    def _serve_line(self) -> bool:
        served = False
        while self._line and len(self._holders) < self._limit:
            first = next(iter(self._line))
            del self._line[first]
            self._holders.add(first)
            served = True
        return served


SHORT_S = 0.5
"""How long room is short before pins are given up: what is unpinned then may be evicted, and has to be made again."""


class Admission(enum.Enum):
    WAIT = "wait"
    RUN = "run"
    PARTIAL = "partial"
    FAIL = "fail"


@dataclass(frozen=True)
class Failure:
    """A request that cannot go on, what it lacks, and why (of several causes, the first)."""

    request: str
    keys: list[str]
    cause: str


class FeatureDesk:
    """Not thread-safe; the owner holds one lock around every call."""

    def __init__(self, table: FeatureTable, recompute_limit: int) -> None:
        self.table = table
        self.slots = RecomputeSlots(recompute_limit)
        self.counters: Counter[str] = Counter()
        self.partial = ""  # the request that runs up to an item that is still looked for
        self._decided: set[str] = set()
        self._waits: dict[str, None] = {}  # told to WAIT when it last asked, the longest first
        self._let_run: set[str] = set()  # what these need may be promised to vLLM, or being loaded
        self._short_since = self._short_at = float("-inf")
        self._failed: dict[str, bool] = {}  # request → whether vLLM was told

    def admission(
        self, request: str, keys: Sequence[str], now: float, *, must_not_recompute: bool, worth: int | None = None
    ) -> Admission:
        """Asked at every step, O(len(keys)).

        Args:
            keys: items that its prefill has not passed yet, in the order of the prompt.
            worth: PARTIAL pays once so many of them are here, from the first on (`leading`). None: it never does.
        """
        if request in self._failed:
            return Admission.WAIT  # vLLM has been told, or will be at the end of this step
        admission = self._admission(request, keys, now, must_not_recompute=must_not_recompute)
        if admission is Admission.RUN:
            self._no_longer_partial(request)
        elif admission is Admission.WAIT and worth is not None and self._may_begin(request, keys, now, worth):
            self.counters["partial_prefills"] += self.partial != request
            self.partial, admission = request, Admission.PARTIAL
        if admission is Admission.WAIT:
            self._waits.setdefault(request)
        else:
            self._waits.pop(request, None)
        if admission in (Admission.RUN, Admission.PARTIAL):
            self._let_run.add(request)
        return admission

    def leading(self, request: str, keys: Sequence[str], now: float) -> int:
        """How many of these are here, from the first on."""
        states = (self.table.need(request, key, now) for key in keys)
        return sum(1 for _ in itertools.takewhile(lambda state: state is FeatureState.READY, states))

    def _may_begin(self, request: str, keys: Sequence[str], now: float, worth: int) -> bool:
        if self.partial not in ("", request):
            return False
        here = self.leading(request, keys, now)
        return here >= worth and self.table.is_missed(keys[here])  # else it may be here in a moment

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
            self._waits.pop(request, None)
            self._let_run.discard(request)
            self._no_longer_partial(request)
            self._needs_no_slot(request)
        self.table.release(requests)

    def passed(self, request: str) -> None:
        """The request's prefill has all its items behind it, or a prefix cache has them all while it waits."""
        self._no_longer_partial(request)
        if request in self._decided:
            self._decided.discard(request)
            self.slots.give_back(request)
        elif request in self._waits:  # it would get a slot that it never gives back before its end
            self._waits.pop(request)
            self.slots.give_back(request)
            self.table.forgo(request)

    def waiting(self) -> bool:
        """Whether a request waits for a feature or a slot."""
        return bool(self.slots.standing or self.table.wanted())

    def make_room(self, now: float) -> None:
        """Somebody waits for room in the store. To be called as long as that is so, a few times a second."""
        if now > self._short_at + PARK_S:
            self._short_since = now
        self._short_at = now
        if now < self._short_since + SHORT_S:
            return
        incomplete = self.table.incomplete()
        stays = self.partial or next((request for request in (*self._waits, *incomplete) if request in incomplete), "")
        if stays:
            self.table.park({stays, *self._let_run}, now)

    def room_again(self) -> None:
        """Nobody waits for room any more."""
        self._short_at = float("-inf")
        self.table.unpark()

    def _no_longer_partial(self, request: str) -> None:
        if self.partial == request:
            self.partial = ""

    def _needs_no_slot(self, request: str) -> None:
        self.slots.give_back(request)
        if request in self._decided:
            self._decided.discard(request)
            self.table.undecide(request)
