"""Request bodies that instances die of, or fail on alike: deaths are counted by body, and a body with two of them is
refused for a while; 500s are compared under one request, whose own body is to blame if two instances say the same.

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
import math
import random
import secrets
import time
from collections import defaultdict
from functools import partial
from typing import Self

import xxhash
from msgspec import Struct

from epd_serve.errors import StageError
from epd_serve.instances import IncarnationId
from proxy.config.limits import PoisonLimits
from proxy.errors import FaultyBody, PoisonousRequest, StageFault
from proxy.metrics import Metrics
from proxy.stages import sse

logger = logging.getLogger(__name__)

DEATHS = 2
"""Counted deaths that refuse a body, and that end a request which was alone on both instances."""

TOGETHER_S = 1.0
"""Deaths within this time count as one."""

SHARED_DEATHS = 8
"""Instances that may die under one request, whoever else was there."""

GENERIC = "500: Internal server error"
"""How vLLM (0.23 to 0.32, `GenerationError`) says that a request failed in the engine, as where its KV did not come."""
NEVER_THE_BODY = (GENERIC, f"500: {sse.ABORTED}")

REMEMBERED = 64
"""Incarnations that are remembered to have died, since each request that was there notices by itself."""


class _Deaths:
    """Those that count against one body, or one request.

    Attributes:
        encoding: for each, whether it came while the body was being encoded. last: when the last one came.
        refused_for_s: for how long the body was refused the last time, until `refused_until`.
    """

    def __init__(self) -> None:
        self.encoding: list[bool] = []
        self.last = self.refused_until = -math.inf
        self.refused_for_s = 0.0

    def count(self, stay: Stay, now: float) -> bool:
        """Whether a death under `stay` counts: not within a second of the one before it, and not where the body was on
        its way already then."""
        if now - self.last < TOGETHER_S or stay.since < self.last:
            return False
        self.encoding.append(stay.encoding)
        self.last = now
        return True

    def repeated(self, now: float) -> bool:
        return len(self.encoding) >= DEATHS or now < self.refused_until


class Poison:
    """The bodies of one process under which instances died."""

    def __init__(self, limits: PoisonLimits, metrics: Metrics) -> None:
        self.metrics = metrics
        self.there: defaultdict[IncarnationId, set[Stay]] = defaultdict(set)
        self._limits = limits
        self._bodies: dict[bytes, _Deaths] = {}  # those that died last at the end
        self._dead: dict[IncarnationId, frozenset[WatchedBody]] = {}
        self._salt = secrets.randbits(64)  # of this process: digests tell nobody else which bodies were sent
        for state in ("suspected", "refused"):
            metrics.suspects.labels(state).set_function(partial(self._count, refused=state == "refused"))

    def watched(self, body: bytes | bytearray) -> WatchedBody:
        """The body of one request."""
        return WatchedBody(self, xxhash.xxh3_128_digest(body, seed=self._salt))

    def deaths(self, digest: bytes) -> _Deaths | None:
        """What is held against a body. What is older than `memory_s` is forgotten here."""
        deaths = self._bodies.get(digest)
        if deaths is not None and max(deaths.last, deaths.refused_until) + self._limits.memory_s < _now():
            self.forget(digest)
            return None
        return deaths

    def forget(self, digest: bytes) -> None:
        self._bodies.pop(digest, None)

    def died(self, incarnation_id: IncarnationId, ago_s: float) -> frozenset[WatchedBody]:
        """An instance has died, which is held against all who are there when the first of them says so. Returns the
        requests that were."""
        if incarnation_id in self._dead:
            return self._dead[incarnation_id]
        limits, now, there = self._limits, _now(), self.there[incarnation_id]
        requests = self._dead[incarnation_id] = frozenset(stay.body for stay in there)
        if len(self._dead) > REMEMBERED:
            del self._dead[next(iter(self._dead))]
        counted, repeated = set(), {}
        for stay in there:
            if stay.answered or stay.since < now - ago_s - limits.blame_s:
                continue
            digest = stay.body.digest
            deaths = self.deaths(digest) or _Deaths()
            self.forget(digest)
            self._bodies[digest] = deaths
            if len(self._bodies) > limits.bodies:
                self.forget(next(iter(self._bodies)))
            if deaths.count(stay, now):
                counted.add(digest)
            if deaths.repeated(now):
                repeated[digest] = deaths
        if len(repeated) == 1 and repeated.keys() <= counted:
            (deaths,) = repeated.values()
            del deaths.encoding[DEATHS - 1 :]  # one more death refuses it again
            deaths.refused_for_s = for_s = min(limits.quarantine_max_s, 2 * deaths.refused_for_s or limits.quarantine_s)
            deaths.refused_until = now + for_s
            self.metrics.poisonous.inc()
            stage = incarnation_id[0]
            logger.error("a request body under which instances ended, %s the last, is refused for %.0f s", stage, for_s)
        return requests

    def _count(self, *, refused: bool) -> int:
        every = [self.deaths(digest) for digest in list(self._bodies)]
        return sum(deaths is not None and (deaths.refused_until > _now()) is refused for deaths in every)


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
        self._alone = _Deaths()  # of instances on which there was nobody else
        self._apart_until = -math.inf

    @property
    def suspected(self) -> bool:
        """Its body may be what an instance died of."""
        return self._poison.deaths(self.digest) is not None

    @property
    def apart_s(self) -> float:
        """Seconds until it may be tried again. After a second death they are drawn at random, twice as long each
        further time, so that those who shared their deaths do not meet again, and so that the next one counts."""
        return max(0.0, self._apart_until - _now())

    @property
    def refusal(self) -> StageError | PoisonousRequest | None:
        """Why it is not to be tried again: its body is refused, or enough instances have died under this request."""
        deaths = self._poison.deaths(self.digest)
        if deaths is not None and (left_s := deaths.refused_until - _now()) > 0:
            return PoisonousRequest(
                f"{DEATHS} instances ended while they worked on this request body; it is refused for {left_s:.0f} s. "
                f"Change it, or report it to the operator."
            )
        if self.ended and (self._alone.repeated(_now()) or len(self.ended) >= SHARED_DEATHS):
            names = " and ".join(sorted({name for name, _ in self.ended}))
            message = f"{names} ended while they worked on this, {len(self.ended)} times; it is not tried again"
            return StageError(message, stage=names)
        return None

    @property
    def over(self) -> bool:
        return self.refusal is not None

    def check(self) -> None:
        """Raises its `refusal`."""
        if (refusal := self.refusal) is not None:
            if isinstance(refusal, PoisonousRequest):
                self._poison.metrics.refused.labels("poisonous").inc()
            raise refusal

    def at(self, *incarnation_ids: IncarnationId, encoding: bool = False) -> Stay:
        """One attempt at these instances, for the time of the context that it is."""
        return Stay(self, incarnation_ids, self._poison.there, _now(), self.answers, encoding)

    def answered(self) -> None:
        """An instance has answered it, whole or with a first byte: that clears its body."""
        self._poison.forget(self.digest)
        self.answers += 1
        if self.ended:
            self.ended.clear()
            self._alone, self._apart_until = _Deaths(), -math.inf

    def encoded(self) -> None:
        """All its items are encoded: what an encoder died of was something else."""
        if (deaths := self._poison.deaths(self.digest)) is not None:
            deaths.encoding = [encoding for encoding in deaths.encoding if not encoding]
            if not deaths.encoding:
                self._poison.forget(self.digest)

    def died(self, stay: Stay, incarnation_id: IncarnationId, *, ago_s: float = 0.0) -> bool:
        """One of the instances of `stay` has died, `ago_s` before now; the same death may be met again. Returns whether
        it is news and to be held against others as much as against this request: then it uses up no retry."""
        there = self._poison.died(incarnation_id, ago_s)
        if stay.answered or incarnation_id in self.ended:
            return False
        self._poison.metrics.deaths.labels(incarnation_id[0]).inc()
        self.ended.append(incarnation_id)
        now = _now()
        if there == {self}:
            self._alone.count(stay, now)
        if (more := len(self.ended) - DEATHS) >= 0:
            self._apart_until = now + TOGETHER_S * 2**more * random.uniform(1.0, 2.0)
        return self in there and len(there) > 1


class Stay(Struct, frozen=True, eq=False):
    """One attempt of a request at some instances, where it is among those who are `there` for the time of its context.
    `before`: answers that it had when this began, at `since`."""

    body: WatchedBody
    instances: tuple[IncarnationId, ...]
    there: defaultdict[IncarnationId, set[Stay]]
    since: float
    before: int
    encoding: bool

    @property
    def answered(self) -> bool:
        return self.body.answers > self.before

    def __enter__(self) -> Self:
        for one in self.instances:
            self.there[one].add(self)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.instances:
            self.there[one].discard(self)
            if not self.there[one]:
                del self.there[one]


def _now() -> float:
    return time.monotonic()


class Faults:
    """The 500s of live instances under one request: the same words from two of them are about its body.

    A body that vLLM did not expect fails wherever it is sent, and says nothing about who it is sent to. What an engine
    could not do (`GENERIC`) is not told from that by its words, and is never the body's, nor is the end of an engine.
    """

    def __init__(self) -> None:
        self._said: defaultdict[str, set[IncarnationId]] = defaultdict(set)

    def note(self, fault: StageFault, incarnation_id: IncarnationId) -> frozenset[IncarnationId]:
        """Returns those who are not to blame, since each of them said the same; none while only one did."""
        said = self._said[fault.said]
        said.add(incarnation_id)
        return frozenset(said) if len(said) > 1 and fault.said not in NEVER_THE_BODY else frozenset()


def faulty_body(fault: StageFault) -> FaultyBody:
    return FaultyBody(f"Two instances failed alike on this request body, with {fault.said}; change it.")
