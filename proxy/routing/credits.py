"""How much more may be given to an instance now. Pure: proxies and the simulator go by the same.

Credit is in seconds of an instance's own work: it takes something new while what is before that keeps it busy for no
longer than `encode_s` or `prefill_s`. So it never runs dry while somebody waits, and whoever waits can still be
overtaken, refused or cancelled at no cost, as in a stage nobody can. What it can have done since it reported is done.
Who decodes takes sequences as well, as many as it runs and some more, and prompts for whose KV it has room.

What is counted of an instance is what all processes of the host gave it (`proxy/workers/shared_counters.py`), each
piece from the moment at which it was planned until it has ended, however it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from epd_serve.roles import Role
from proxy.config.limits import AdmissionLimits
from proxy.registry.instance_state import Reported
from proxy.routing.policy import UNMEASURED_RATE, share_of, usual_rate

AHEAD = 1.25
"""Sequences with an instance per sequence that it can run: those being prefilled are about to be decoded."""

KV_FULL = 0.95
"""Of its blocks. Beyond it an instance preempts, or holds requests back, rather than runs more."""


class Credit(Struct, frozen=True):
    """One instance, as far as it matters for what it may be given.

    Attributes:
        role: what it is. tokens: of its kind of work that it could compute now and has not: of prompts, or of items.
        rate: of those it computes a second; 0 while unknown.
        shared_tokens: of a step, where requests share it (`StageReport`).
        requests: that it has.
        sequences: that it may have more of; infinite where it does not decode.
        kv_tokens: for whose KV it has room; infinite where nobody knows.
    """

    role: Role
    tokens: float = 0.0
    rate: float = 0.0
    shared_tokens: int = 0
    requests: int = 0
    sequences: float = math.inf
    kv_tokens: float = math.inf

    def before_s(self, cost: float, usual: float) -> float:
        """Seconds that are before work of so many tokens: nothing where it has its part of the next step, beside all
        that are there. `usual`: rate of its kind."""
        if self.requests * cost <= self.shared_tokens:
            return 0.0
        return self.tokens / (self.rate or usual)


class Need(Struct, frozen=True):
    """What a request takes of the stages.

    Attributes:
        tokens: of its prompt. items: of each of its media items. sequences: that it decodes at once.
        fused: it needs one instance that prefills and decodes.
    """

    tokens: float = 1.0
    items: Sequence[float] = ()
    sequences: int = 1
    fused: bool = False


Credits = Callable[[Role], Sequence[Credit]]
"""Of the live instances of a role."""


def encoders_with_room(credits_of: Credits, need: Need, settings: AdmissionLimits) -> int:
    """How many encoders may be given an item now; at least one where there is none, so that the request is told so."""
    encoders = credits_of(Role.E)
    item = max(need.items, default=1.0)
    return _count(encoders, item, settings.encode_s, UNMEASURED_RATE) if encoders else 1


def heads_with_room(credits_of: Credits, need: Need, settings: AdmissionLimits) -> int:
    """How many instances may be given its prompt now, whose answer has a place where it is decoded. At least one where
    there is none at all, so that the request is told so."""
    whole = [*credits_of(Role.PD), *credits_of(Role.EPD)]
    first = [*credits_of(Role.P), *credits_of(Role.EP)]
    tails = credits_of(Role.D) if first else ()
    alone = first if need.fused and not whole else ()
    if not (whole or alone or (tails and first)):
        return 1
    heads = [one for one in whole if _may_decode(one, need)] if whole else list(alone)
    if not need.fused and any(_may_decode(one, need) for one in tails):
        heads += first
    return _count(heads, need.tokens, settings.prefill_s, settings.prefill_tokens / settings.prefill_s)


def _count(instances: Sequence[Credit], cost: float, credit_s: float, unmeasured: float) -> int:
    usual = usual_rate([one.rate for one in instances], unmeasured)
    return sum(one.before_s(cost, usual) <= credit_s for one in instances)


def _may_decode(one: Credit, need: Need) -> bool:
    """What is larger than all that there is goes alone."""
    return not one.requests or (one.sequences >= need.sequences and one.kv_tokens >= need.tokens)


class Service(Struct, frozen=True):
    """Seconds that a request needs of the stages by itself, and of one instance's time: encode, then prefill."""

    encode_s: float = 0.0
    prefill_s: float = 0.0
    encode_work_s: float = 0.0
    prefill_work_s: float = 0.0


class Speeds(Struct, frozen=True):
    """What is known of how fast the instances are.

    Attributes:
        encode, prefill: tokens a second of a usual one. encoders, heads: how many there are, at least one each.
    """

    encode: float
    prefill: float
    encoders: int = 1
    heads: int = 1

    @classmethod
    def measured(cls, credits_of: Credits, settings: AdmissionLimits) -> Speeds:
        encoders, heads = credits_of(Role.E), [one for role in Role if role.prefills for one in credits_of(role)]
        return cls(
            usual_rate([one.rate for one in encoders or heads]),
            usual_rate([one.rate for one in heads], settings.prefill_tokens / settings.prefill_s),
            max(1, len(encoders)),
            max(1, len(heads)),
        )

    def of(self, *, encode: bool) -> int:
        """How many there are."""
        return self.encoders if encode else self.heads

    def service(self, need: Need) -> Service:
        """By itself, where nobody else is."""
        prefill_s = need.tokens / self.prefill
        if not need.items:
            return Service(prefill_s=prefill_s, prefill_work_s=prefill_s)
        share = share_of(need.items, self.encoders)
        return Service(share / self.encode, prefill_s, sum(need.items) / self.encode, prefill_s)


def seats(report: Reported, held: int, otherwise: int) -> int:
    """Sequences that an instance which decodes may have more of.

    Args:
        held: requests that it was given and that have not ended. otherwise: how many it takes where it does not say.
    """
    if report.kv_used >= KV_FULL and report.waiting:
        return 0
    can = math.ceil(report.max_running * AHEAD) or otherwise
    return max(0, can - max(held, report.running + report.waiting))


def kv_room(report: Reported, unseen_tokens: float) -> float:
    """Tokens for whose KV there is room, beside those that it does not know of yet; infinite where it does not say."""
    return max(0.0, (KV_FULL - report.kv_used) * report.kv_tokens - unseen_tokens) if report.kv_tokens else math.inf
