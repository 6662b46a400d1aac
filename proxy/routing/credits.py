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
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from msgspec import Struct

from epd_serve.roles import Role
from proxy.routing.policy import parts_of, share_of, usual_rate

AHEAD = 1.25
"""Sequences with an instance per sequence that it can run: those being prefilled are about to be decoded."""

KV_FULL = 0.95
"""Of its blocks. Beyond it an instance preempts, or holds requests back, rather than runs more."""


class CreditLimits(Protocol):
    """What of the settings credits go by (`AdmissionLimits`, which is above this)."""

    @property
    def encode_s(self) -> float: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def prefill_tokens(self) -> int: ...


class Holds(Protocol):
    """What of a `StageReport` says how much who decodes may have more; a simulated stage has it without a report."""

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def kv_used(self) -> float: ...
    @property
    def kv_tokens(self) -> int: ...


class Credit(Struct, frozen=True):
    """One instance, as far as it matters for what it may be given.

    Attributes:
        role: what it is. tokens: of its kind of work that it could compute now and has not: of prompts, or of items.
        rate: of those it computes a second; 0 while unknown.
        shared_tokens: of a step, where requests share it (`StageReport`). prompts: of how many that may be.
        requests: that it has.
        sequences: that it may have more of; infinite where it does not decode.
        kv_tokens: for whose KV it has room; infinite where nobody knows.
        preparing_s: for so long its API server has a request, lately, before its scheduler does.
    """

    role: Role
    tokens: float = 0.0
    rate: float = 0.0
    shared_tokens: int = 0
    prompts: int = 0
    requests: int = 0
    sequences: float = math.inf
    kv_tokens: float = math.inf
    preparing_s: float = 0.0

    def before_s(self, cost: float, usual: float, *, shares: bool = True) -> float:
        """Seconds that are before work of so many tokens, beyond those that it takes to prepare it: nothing where it
        has its part of the next step, beside all that are there, unless it `shares` none. `usual`: rate of its kind."""
        if shares and self.shared_tokens and self.prompts * cost <= self.shared_tokens:
            return 0.0
        return self.tokens / (self.rate or usual) - self.preparing_s


class Need(Struct, frozen=True):
    """What a request takes of the stages.

    Attributes:
        tokens: of its prompt. items: of each of its media items. tiles: into how many parts each may be cut; () where
            none may. sequences: that it decodes at once.
        fused: it needs one instance that prefills and decodes.
        yields: it is late, so it is given no part of a step that others may come to want.
    """

    tokens: float = 1.0
    items: Sequence[float] = ()
    tiles: Sequence[int] = ()
    sequences: int = 1
    fused: bool = False
    yields: bool = False


Credits = Callable[[Role], Iterable[Credit]]
"""Of the live instances of a role. Each is worked out when it is looked at."""


def encoders_with_room(credits_of: Credits, need: Need, settings: CreditLimits, speeds: Speeds, enough: int) -> int:
    """How many encoders may be given an item now, of as many as are `enough`; all of these where there is none at all,
    so that the request is told so."""
    if not speeds.encoders_there:
        return enough
    item = max(need.items, default=1.0)
    return _count(credits_of(Role.E), item, need, settings.encode_s, speeds.encode, enough)


def heads_with_room(credits_of: Credits, need: Need, settings: CreditLimits, speeds: Speeds, enough: int) -> int:
    """How many instances may be given its prompt now, whose answer has a place where it is decoded. `enough` as of
    encoders."""
    if not speeds.paths_there:
        return enough
    whole = (one for role in (Role.PD, Role.EPD) for one in credits_of(role) if _may_decode(one, need))
    rooms = _count(whole, need.tokens, need, settings.prefill_s, speeds.prefill, enough)
    if rooms < enough and (speeds.fused_alone or not need.fused):
        alone = need.fused or any(_may_decode(one, need) for one in credits_of(Role.D))
        first = (one for role in (Role.P, Role.EP) for one in credits_of(role)) if alone else ()
        rooms += _count(first, need.tokens, need, settings.prefill_s, speeds.prefill, enough - rooms)
    return rooms


def _count(instances: Iterable[Credit], cost: float, need: Need, credit_s: float, usual: float, enough: int) -> int:
    shares = not need.yields
    with_room = (one for one in instances if one.before_s(cost, usual, shares=shares) <= credit_s)
    return sum(1 for _ in islice(with_room, enough))


def _may_decode(one: Credit, need: Need) -> bool:
    """What is larger than all that there is goes alone."""
    return not one.requests or (one.sequences >= need.sequences and one.kv_tokens >= need.tokens)


class Service(Struct, frozen=True):
    """Seconds that a request needs of the stages by itself, and of one instance's time: encode, then prefill.
    `longest_item_s`: of its items, the one that takes longest."""

    encode_s: float = 0.0
    prefill_s: float = 0.0
    encode_work_s: float = 0.0
    prefill_work_s: float = 0.0
    longest_item_s: float = 0.0


class Speeds(Struct, frozen=True):
    """What is known of how fast the instances are, and which there are.

    Attributes:
        encode, prefill: tokens a second of a usual one. encoders, heads: how many there are, at least one each.
        encoders_there: there is one. paths_there: a prompt has a way. fused_alone: one that needs both halves of an
            answer at one instance has it from one that only prefills.
    """

    encode: float
    prefill: float
    encoders: int = 1
    heads: int = 1
    encoders_there: bool = False
    paths_there: bool = False
    fused_alone: bool = False

    @classmethod
    def measured(cls, credits_of: Credits, settings: CreditLimits) -> Speeds:
        by_role = {role: [*credits_of(role)] for role in Role}
        encoders, whole = by_role[Role.E], by_role[Role.PD] + by_role[Role.EPD]
        first, tails = by_role[Role.P] + by_role[Role.EP], by_role[Role.D]
        heads = whole + first
        return cls(
            usual_rate([one.rate for one in encoders or heads]),
            usual_rate([one.rate for one in heads], settings.prefill_tokens / settings.prefill_s),
            max(1, len(encoders)),
            max(1, len(heads)),
            bool(encoders),
            bool(whole or (first and tails)),
            bool(first) and not whole,
        )

    def of(self, *, encode: bool) -> int:
        """How many there are."""
        return self.encoders if encode else self.heads

    def service(self, need: Need) -> Service:
        """By itself, where nobody else is."""
        prefill_s = need.tokens / self.prefill
        if not need.items:
            return Service(prefill_s=prefill_s, prefill_work_s=prefill_s)
        items = need.items
        if (most := max(need.tiles, default=1)) > 1 and (parts := parts_of(most, len(items), self.encoders)) > 1:
            cuts = [min(tiles, parts) for tiles in need.tiles]
            items = [cost / cut for cost, cut in zip(items, cuts, strict=True) for _ in range(cut)]
        share = share_of(items, self.encoders)
        longest_s = max(items) / self.encode
        return Service(share / self.encode, prefill_s, sum(need.items) / self.encode, prefill_s, longest_s)


def seats(report: Holds, held: int, otherwise: int) -> int:
    """Sequences that an instance which decodes may have more of.

    Args:
        held: requests that it was given and that have not ended. otherwise: how many it takes where it does not say.
    """
    if report.kv_used >= KV_FULL and report.waiting:
        return 0
    can = math.ceil(report.max_running * AHEAD) or otherwise
    return max(0, can - max(held, report.running + report.waiting))


def kv_room(report: Holds, unseen_tokens: float) -> float:
    """Tokens for whose KV there is room, beside those that it does not know of yet; infinite where it does not say."""
    return max(0.0, (KV_FULL - report.kv_used) * report.kv_tokens - unseen_tokens) if report.kv_tokens else math.inf
