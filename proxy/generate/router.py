"""Pick the instances of one attempt, and wait for a missing role: the table meets the policies here.

Every instance that takes prompts (a head: P, EP, PD, EPD) competes with every other one, whatever its kind: loads of
heads are all prompt tokens. Whether a request's items are encoded apart follows from the head, not from the layout, and
is decided twice: before the encode step by where the request would go (`encodes_apart`), and by the route itself, which
prefers heads for which the items are ready (`Job.features`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from epd_serve.errors import NoInstanceError
from epd_serve.instances import IncarnationId
from epd_serve.roles import Role
from proxy.media.loader import LoadedItem
from proxy.metrics import Metrics
from proxy.registry.instance_state import Lease, Work
from proxy.registry.prefix_index import Known
from proxy.registry.table import InstanceTable
from proxy.routing.paths import Path, paths
from proxy.routing.policy import (
    POLICIES,
    Candidate,
    Placement,
    burden,
    first_token,
    least_loaded,
    left_of,
    most_cached,
    preferred,
    with_neighbours,
)
from proxy.stages.job import Job

Flags = tuple[str, ...] | None
"""`Instance.answer_flags`, or None for any."""


class Route(Struct, frozen=True):
    """The instances of one attempt, already counted as busy. Whoever holds it releases it."""

    path: Path
    prefill: Lease | None
    decode: Lease

    def release(self) -> None:
        self.decode.release()
        if self.prefill is not None:
            self.prefill.release()


class _HeadChoice(Struct, frozen=True):
    """One head that a request can go to, and what comes with it.

    Attributes:
        head: as the policy sees it: encoding that the request has to wait for first counts as load of its own.
        tail: who decodes, where the head does not.
        tails: among whom that one was chosen.
        rank: what speaks against it, before any load.
    """

    path: Path
    head: Candidate
    tail: Candidate | None
    tails: Sequence[Candidate]
    rank: tuple[int, ...]


class _Prompt(Struct, frozen=True):
    """The prompt that is to be placed, and what is cached of it where."""

    placement: Placement
    known: Known

    def seen_by(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """`candidates` with what each has cached of it."""
        held = self.known.held
        if not held:
            return candidates
        return [
            replace(one, cached=float(tokens)) if (tokens := held.get(one.incarnation_id)) else one
            for one in candidates
        ]


class Router:
    """Routes over the instances of one table.

    Args:
        policy: name of the one that chooses (`proxy/routing/policy.py`).
    """

    def __init__(
        self, table: InstanceTable, metrics: Metrics, *, instance_wait_s: float, policy: str = "first-token"
    ) -> None:
        self._table = table
        self._metrics = metrics
        self._instance_wait_s = instance_wait_s
        self._policy_name = policy
        self._policy = POLICIES[policy]
        # A decode instance answers with what another one has prefilled: there is no first token to predict.
        self._tail_policy = most_cached if self._policy is first_token else self._policy
        self._random = random.Random()

    def encodes_apart(self, job: Job) -> bool:
        """Whether the items of `job` are to go to encoders before it is routed: whether the head that it would go to
        now leaves encoding to others. Nothing is counted as busy by this."""
        if not job.items:
            return False
        live = paths(self._roles(job), multimodal=True, fused=_fused(job))
        # Nobody is up: encode meanwhile where there is no other way; else decide when somebody is.
        possible = live or paths(self._table.wanted, multimodal=True, fused=_fused(job))
        ways = {path.encode for path in possible}
        if len(ways) > 1:
            choice = self._pick(job, (), self._prompt(job), noted=True) if live else None
            return choice is not None and choice.path.encode
        return True in ways

    async def route(self, job: Job, *, avoid: Collection[IncarnationId] = (), like: Flags = None) -> Route:
        """A way through the live instances, by the policy, preferring incarnations not in `avoid`. `like`: flags of who
        decodes, where an answer goes on.

        Its path may encode apart although `job.features` is None (the heads that would not are gone): then the encode
        step comes first. Waits up to `instance_wait_s` for a missing role, and as long as a pause takes. Raises
        NoInstanceError after that.
        """
        now = self._table.pause.now
        until = now() + self._instance_wait_s
        prompt = self._prompt(job)
        since, missing = time.monotonic(), ""
        while (choice := self._pick(job, avoid, prompt, like, noted=True)) is None:
            if (left_s := until - now()) <= 0:
                job.record.took("waited", since, missing=missing)
                missing = ", ".join(self._table.missing()) or "an instance"
                raise NoInstanceError(f"no live instance: {missing} is missing; try again later")
            missing = missing or ", ".join(self._table.missing()) or "an instance"
            await self._table.changed(left_s)
        if missing:
            job.record.took("waited", since, missing=missing)
        left = left_of(prompt.placement.cost, choice.head)
        self._count(prompt, choice)
        if choice.tail is None:
            return Route(choice.path, None, self._table.acquire(choice.head.id, Work.DECODE, left))
        prefill = self._table.acquire(choice.head.id, Work.PREFILL, left)
        return Route(choice.path, prefill, self._table.acquire(choice.tail.id, Work.DECODE))

    def _count(self, prompt: _Prompt, choice: _HeadChoice) -> None:
        tokens = {"all": prompt.placement.cost, "known": prompt.known.tokens, "prefill": choice.head.cached}
        if choice.tail is not None:
            tokens["decode"] = choice.tail.cached
        for which, count in tokens.items():
            self._metrics.prefix_tokens.labels(which).inc(count)

    def has_alternative(self, job: Job, *, avoid: Collection[IncarnationId], like: Flags = None) -> bool:
        """True when an attempt that touches no incarnation in `avoid` is possible right now."""
        choice = self._pick(job, avoid, self._prompt(job), like)
        return choice is not None and not any(
            part is not None and part.incarnation_id in avoid for part in (choice.head, choice.tail)
        )

    def _prompt(self, job: Job) -> _Prompt:
        known = self._table.prefixes.known(job.prompt.nodes)
        # The beginning that is known is counted, the rest estimated.
        tokens = known.tokens + job.prompt.tokens_after[known.node] if known.tokens else job.tokens
        return _Prompt(Placement(max(tokens, 1.0), self._random.getrandbits(32)), known)

    def _pick(
        self,
        job: Job,
        avoid: Collection[IncarnationId],
        prompt: _Prompt,
        like: Flags = None,
        *,
        noted: bool = False,
    ) -> _HeadChoice | None:
        """`noted`: the request goes by it."""
        choices = self._choices(job, avoid, prompt, like)
        if not choices:
            return None
        chosen = choices[0]
        if len(choices) > 1:
            fittest = min(choice.rank for choice in choices)
            compared = [choice for choice in choices if choice.rank == fittest]
            head = self._policy([choice.head for choice in compared], prompt.placement)
            chosen = next(choice for choice in compared if choice.head is head)
        if noted:
            self._note(job, choices, chosen, prompt.placement)
        return chosen

    def _note(self, job: Job, choices: Sequence[_HeadChoice], chosen: _HeadChoice, placement: Placement) -> None:
        job.record.chose(
            "prompt",
            self._policy_name,
            placement.cost,
            [choice.head for choice in choices],
            [chosen.head.id],
            paths=[choice.path.name for choice in choices],
            ranks=[choice.rank for choice in choices],
        )
        if chosen.tail is not None:
            policy = self._policy_name
            if self._tail_policy is most_cached:
                policy = "most-cached" if any(one.cached for one in chosen.tails) else "least-loaded"
            job.record.chose("decode", policy, 1.0, chosen.tails, [chosen.tail.id])

    def _choices(self, job: Job, avoid: Collection[IncarnationId], prompt: _Prompt, like: Flags) -> list[_HeadChoice]:
        """Every live head that the job can go to, and of each kind with which tail."""
        undecided = bool(job.items) and job.features is None
        encoders = self._table.live(Role.E) if undecided else ()
        choices = []
        for path in paths(self._roles(job), multimodal=bool(job.items), fused=_fused(job)):
            tails = preferred(prompt.seen_by(self._alike(path.tail, like)), avoid) if path.tail is not None else ()
            if path.tail is not None and not tails:
                continue
            tail = self._tail_policy(tails, replace(prompt.placement, cost=1.0)) if tails else None
            for head in prompt.seen_by(self._alike(path.head, like if path.tail is None else None)):
                rank = (
                    burden(head, avoid) + (burden(tail, avoid) if tail is not None else 0),
                    int(job.features is not None and not path.encode),
                    int(path.encode and undecided and not encoders),
                )
                if undecided:
                    head = _with_encoding(head, job.items, encoders if path.encode else ())
                choices.append(_HeadChoice(path, head, tail, tails, rank))
        return choices

    def _alike(self, role: Role, like: Flags) -> Sequence[Candidate]:
        """Those that are live, of these flags where they matter."""
        live = self._table.live(role)
        if like is None:
            return live
        return [one for one in live if self._table.instance(one.id).answer_flags == like]

    def _roles(self, job: Job) -> frozenset[Role]:
        """Those of live instances. E counts as live while one is wanted: the encode step itself copes with none
        being up."""
        roles = self._table.live_roles()
        return roles | self._table.wanted & {Role.E} if job.items else roles


def _fused(job: Job) -> bool:
    return job.request.needs_fused is not None


def _with_encoding(head: Candidate, items: Sequence[LoadedItem], encoders: Sequence[Candidate]) -> Candidate:
    """`head` with the encoding that the request has to wait for first as load of its own: at the head itself, or shared
    by `encoders` and behind what the first of them to be done has to do, in the head's time where both speeds are
    known."""
    tokens = sum(item.tokens for item in items)
    if encoders:
        encoder = least_loaded(with_neighbours(encoders, tokens / min(len(items), len(encoders))))
        tokens = encoder.load + tokens / min(len(items), len(encoders))
        if head.rate > 0 and encoder.rate > 0:
            tokens *= head.rate / encoder.rate
    return replace(head, load=head.load + tokens)
