"""Request bodies that instances die of: deaths are counted by body, and a body with two of them is refused for a while.

A death is held against every body that was on the instance without an answer and had been sent there within the last
`blame_s`. Whoever shared an instance with a poisonous body looks as guilty as that one, so:

- Any answer or first byte clears a body, whoever sent it. What is sent often is answered between two deaths somewhere.
- Of deaths within a second, as where a node goes with several instances, one counts, and so does one of a body's deaths
  that were all sent before the first.
- A body is refused at its second death if no other one that was there had a second death, too. Until then those who
  share their deaths are spread in time before they are tried again, so that they do not meet once more.

One process counts for itself, by a salted digest. How often one request is tried again is counted here, too.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from epd_serve.errors import StageError
from epd_serve.instances import IncarnationId
from proxy.config.limits import PoisonLimits
from proxy.errors import PoisonousRequest
from proxy.metrics import Metrics

logger = logging.getLogger(__name__)

DEATHS = 2
"""Counted deaths that refuse a body, and that end a request which was alone on both instances."""

TOGETHER_S = 1.0
"""Deaths within this time count as one."""

SHARED_DEATHS = 8
"""Instances that may die under one request, whoever else was there."""

REMEMBERED = 64
"""Incarnations that are remembered to have died, since each request that was there notices by itself."""


@dataclass
class _Entry:
    """What is held against one body.

    Attributes:
        deaths: counted ones; `of_encoders`: how many of them while it was being encoded.
        last_died: incarnation that died last. convictions: how often it was refused so far.
        last_death, refused_until, forgotten_at: times, of `_now`.
    """

    deaths: int = 0
    of_encoders: int = 0
    last_died: IncarnationId | None = None
    last_death: float = float("-inf")
    convictions: int = 0
    refused_until: float = 0.0
    forgotten_at: float = 0.0


@dataclass(frozen=True)
class _Death:
    """When an instance was found to have died, and the requests that were there."""

    at: float
    requests: frozenset[WatchedBody]


class Poison:
    """The bodies of one process under which instances died."""

    def __init__(self, limits: PoisonLimits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()  # those that died last at the end
        self.there: defaultdict[IncarnationId, set[Stay]] = defaultdict(set)
        self._dead: OrderedDict[IncarnationId, _Death] = OrderedDict()
        self._salt = secrets.randbits(64)  # of this process: digests tell nobody else which bodies were sent
        metrics.suspects.labels("suspected").set_function(lambda: self._count(refused=False))
        metrics.suspects.labels("refused").set_function(lambda: self._count(refused=True))

    def watched(self, body: bytes | bytearray) -> WatchedBody:
        """The body of one request."""
        return WatchedBody(self, xxhash.xxh3_128_digest(body, seed=self._salt))

    def entry(self, digest: bytes) -> _Entry | None:
        """What is held against a body. What is older than `memory_s` is forgotten here."""
        entry = self.entries.get(digest)
        if entry is None:
            return None
        now = _now()
        if entry.forgotten_at < now:
            del self.entries[digest]
            return None
        if 0 < entry.refused_until <= now:  # one more death refuses it again
            entry.refused_until, entry.deaths, entry.of_encoders = 0.0, DEATHS - 1, min(entry.of_encoders, DEATHS - 1)
        return entry

    def died(self, incarnation_id: IncarnationId, stay: Stay, ago_s: float) -> frozenset[WatchedBody]:
        """An instance has died under `stay`: held against all who are there, when the first of them says so. Returns
        the requests that were."""
        death = self._dead.get(incarnation_id)
        if death is None or stay.since > death.at:
            there = self.there[incarnation_id]
            death = self._dead[incarnation_id] = _Death(_now(), frozenset(one.body for one in there))
            if len(self._dead) > REMEMBERED:
                self._dead.popitem(last=False)
            self._blame(incarnation_id, there, death.at - ago_s)
        return death.requests

    def _blame(self, incarnation_id: IncarnationId, there: set[Stay], died_at: float) -> None:
        now = _now()
        counted: set[bytes] = set()
        repeated: dict[bytes, _Entry] = {}
        for stay in there:
            if stay.answered or died_at - stay.since > self.limits.blame_s:
                continue
            digest = stay.body.digest
            entry = self._entry_of_death(digest)
            if incarnation_id != entry.last_died and counts(stay.since, entry.last_death, now):
                counted.add(digest)
                entry.deaths += 1
                entry.of_encoders += stay.encoding
                entry.last_died, entry.last_death = incarnation_id, now
                entry.forgotten_at = now + self.limits.memory_s
            if entry.deaths >= DEATHS:
                repeated[digest] = entry
        if len(repeated) == 1 and repeated.keys() <= counted:
            (entry,) = repeated.values()
            self._refuse(entry, incarnation_id[0], now)

    def _entry_of_death(self, digest: bytes) -> _Entry:
        entry = self.entry(digest)
        if entry is None:
            while len(self.entries) >= self.limits.bodies:
                self.entries.popitem(last=False)
            entry = self.entries[digest] = _Entry()
        self.entries.move_to_end(digest)
        return entry

    def _refuse(self, entry: _Entry, stage: str, now: float) -> None:
        limits = self.limits
        for_s = min(limits.quarantine_max_s, limits.quarantine_s * 2.0**entry.convictions)
        entry.refused_until = now + for_s
        entry.forgotten_at = entry.refused_until + limits.memory_s
        entry.convictions += 1
        self.metrics.poisonous.inc()
        logger.error("a request body under which instances ended, %s the last, is refused for %.0f s", stage, for_s)

    def _count(self, *, refused: bool) -> int:
        entries = [self.entry(digest) for digest in list(self.entries)]
        return sum(entry is not None and (entry.refused_until > 0) is refused for entry in entries)


class WatchedBody:
    """One request, and the instances that died under it.

    Attributes:
        digest: of its body, which other requests may have, too.
        answers: how often an instance has answered it, whole or with a first byte.
        ended: incarnations that died under it since its last answer.
    """

    def __init__(self, poison: Poison, digest: bytes) -> None:
        self.digest = digest
        self.answers = 0
        self.ended: list[IncarnationId] = []
        self._poison = poison
        self._alone = 0  # counted deaths of instances on which there was nobody else
        self._alone_at = float("-inf")
        self._apart_until = float("-inf")

    @property
    def suspected(self) -> bool:
        """Its body may be what an instance died of."""
        return self._poison.entry(self.digest) is not None

    @property
    def over(self) -> bool:
        """It is not to be tried again: its body is refused, or enough instances have died under this request."""
        return self._refused_until > 0 or self._exhausted

    @property
    def apart_s(self) -> float:
        """Seconds until it may be tried again. After a second death they are drawn at random, twice as long each
        further time, so that those who shared their deaths do not meet again, and so that the next one counts."""
        return max(0.0, self._apart_until - _now())

    def check(self) -> None:
        """Raises PoisonousRequest: its body is refused. StageError: enough instances have died under this request."""
        if self._refused_until:
            self._poison.metrics.refused.labels("poisonous").inc()
            raise PoisonousRequest(
                f"{DEATHS} instances ended while they worked on this request body; it is refused for "
                f"{self._refused_until - _now():.0f} s. Change it, or report it to the operator.",
            )
        if self._exhausted:
            names = _names_of(self.ended)
            raise StageError(f"{names} ended while they worked on this; it is not tried again", stage=names)

    @contextmanager
    def at(self, *incarnation_ids: IncarnationId, encoding: bool = False) -> Iterator[Stay]:
        """The time of one attempt at these instances."""
        stay, there = Stay(self, _now(), self.answers, encoding), self._poison.there
        for one in incarnation_ids:
            there[one].add(stay)
        try:
            yield stay
        finally:
            for one in incarnation_ids:
                there[one].discard(stay)
                if not there[one]:
                    del there[one]

    def answered(self) -> None:
        """An instance has answered it, whole or with a first byte: that clears its body."""
        self._poison.entries.pop(self.digest, None)
        self.answers += 1
        self.ended.clear()
        self._alone, self._apart_until = 0, float("-inf")

    def encoded(self) -> None:
        """All its items are encoded: what an encoder died of was something else."""
        entry = self._poison.entry(self.digest)
        if entry is not None and entry.of_encoders:
            entry.deaths, entry.of_encoders = entry.deaths - entry.of_encoders, 0
            if not entry.deaths:
                del self._poison.entries[self.digest]

    def died(self, stay: Stay, incarnation_id: IncarnationId, *, ago_s: float = 0.0) -> bool:
        """One of the instances of `stay` has died, `ago_s` before now; the same death may be met again. Returns whether
        it is news and to be held against others as much as against this request: then it uses up no retry."""
        there = self._poison.died(incarnation_id, stay, ago_s)
        if stay.answered or incarnation_id in self.ended:
            return False
        self._poison.metrics.deaths.labels(incarnation_id[0]).inc()
        self.ended.append(incarnation_id)
        now = _now()
        if there == {self} and counts(stay.since, self._alone_at, now):
            self._alone += 1
            self._alone_at = now
        if len(self.ended) >= DEATHS:
            self._apart_until = now + TOGETHER_S * 2 ** (len(self.ended) - DEATHS) * random.uniform(1.0, 2.0)
        return self in there and len(there) > 1

    @property
    def _refused_until(self) -> float:
        entry = self._poison.entry(self.digest)
        return entry.refused_until if entry is not None else 0.0

    @property
    def _exhausted(self) -> bool:
        return self._alone >= DEATHS or len(self.ended) >= SHARED_DEATHS


@dataclass(frozen=True, eq=False, slots=True)
class Stay:
    """One attempt of a request at some instances. `before`: answers that it had when this began, at `since`."""

    body: WatchedBody
    since: float
    before: int
    encoding: bool

    @property
    def answered(self) -> bool:
        return self.body.answers > self.before


def counts(sent: float, last_death: float, now: float) -> bool:
    """Whether a death counts beside the one before it: not within a second of that one, and not where the body was on
    its way already."""
    return now - last_death >= TOGETHER_S and sent >= last_death


def _names_of(incarnation_ids: list[IncarnationId]) -> str:
    """The instances, and how often where it was more than once."""
    times = Counter(name for name, _ in incarnation_ids)
    return " and ".join(f"{name} {count} times" if count > 1 else name for name, count in sorted(times.items()))


def _now() -> float:
    return time.monotonic()
