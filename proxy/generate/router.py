"""Plans for requests over the instances of one table, and the wait for a missing role: `proxy/routing/plan.py` meets
the table here.

A request is planned once, when it is about to go to the stages: then nothing of what the plan goes by is stale. Where
heads that encode for themselves stand beside others, it is planned before its items are encoded as well, since who
encodes follows from where it goes; that plan stands unless something is waited for meanwhile. Every further plan has a
reason, which `epd-serve why` tells.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection

from msgspec import Struct

from epd_serve.errors import NoInstanceError
from epd_serve.instances import IncarnationId
from epd_serve.roles import Role
from proxy.metrics import Metrics
from proxy.registry.instance_state import Lease, Work
from proxy.registry.prefix_index import Known
from proxy.registry.table import InstanceTable
from proxy.routing.paths import Path
from proxy.routing.plan import Flags, Pick, Plan, Question, View, make_plan, ways
from proxy.routing.policy import Placement
from proxy.stages.job import Job

STANDS_S = 0.05
"""For how long a plan stands whose instances are not counted as busy yet."""


class Needs(Struct, frozen=True):
    """What a plan has to heed beside the request itself.

    Attributes:
        avoid: incarnations at which it has failed.
        flags: `Instance.answer_flags` of who decodes, where an answer goes on; None for any.
        ahead: its items are being encoded.
    """

    avoid: Collection[IncarnationId] = ()
    flags: Flags = None
    ahead: bool = False


class Made(Struct, frozen=True):
    """A plan: why and when it was made, and for which prompt."""

    plan: Plan
    because: str
    at: float
    placement: Placement
    known: Known


class Route(Struct, frozen=True):
    """The instances of one attempt, already counted as busy. Whoever holds it releases it.

    Attributes:
        decode_waits: D is to be called when the first item is encoded.
    """

    path: Path
    prefill: Lease | None
    decode: Lease
    decode_waits: bool = False

    def release(self) -> None:
        self.decode.release()
        if self.prefill is not None:
            self.prefill.release()


class Router:
    """Plans over the instances of one table.

    Args:
        policy: name of the one that chooses (`proxy/routing/policy.py`).
        overlap: whether D waits for a tower that shares cores with it (`auto`).
    """

    def __init__(
        self,
        table: InstanceTable,
        metrics: Metrics,
        *,
        instance_wait_s: float,
        policy: str = "first-token",
        overlap: str = "auto",
    ) -> None:
        self._table = table
        self._metrics = metrics
        self._instance_wait_s = instance_wait_s
        self._policy = policy
        self._spares_towers = overlap == "auto"
        self._random = random.Random()

    def before_encoding(self, job: Job) -> tuple[bool, Made | None]:
        """Whether the items of `job` are to go to encoders before it goes elsewhere, and the plan that says so, where
        that follows from no less. Nothing is counted as busy by this."""
        if not job.items:
            return False, None
        possible = ways(Question(Placement(), _tokens_of(job), fused=_fused(job)), self._roles())
        if len(possible) == 1:
            return True in possible, None
        made = self.plan(job, "it arrived")
        if made is None or not made.plan.path.encode:
            return False, made
        job.record.planned(made.plan, made.because)
        return True, None  # what is pending has changed when they are encoded

    def take(self, job: Job, made: Made) -> Route | None:
        """The route of a plan, if it still stands: an instance may have gone, and what it went by changes."""
        if time.monotonic() - made.at > STANDS_S:
            return None
        picks = [made.plan.head] if made.plan.tail is None else [made.plan.head, made.plan.tail]
        if not all(self._stands(pick) for pick in picks):
            return None
        return self._taken(job, made)

    async def route(self, job: Job, because: str, needs: Needs = Needs()) -> Route:
        """The route of a new plan, as `plan` makes it. Waits up to `instance_wait_s` for a missing role, and as long as
        a pause takes. Raises NoInstanceError after that.
        """
        now = self._table.pause.now
        until = now() + self._instance_wait_s
        since, missing = time.monotonic(), ""
        while (made := self.plan(job, because, needs)) is None:
            if (left_s := until - now()) <= 0:
                job.record.took("waited", since, missing=missing)
                raise NoInstanceError(f"no live instance: {self._missing()} is missing; try again later")
            missing = missing or self._missing()
            await self._table.changed(left_s)
        if missing:
            job.record.took("waited", since, missing=missing)
        return self._taken(job, made)

    def plan(self, job: Job, because: str, needs: Needs = Needs()) -> Made | None:
        """A plan through what is live now, None where a role is missing. Nothing is counted as busy by it. `because`:
        why it is made."""
        known = self._table.prefixes.known(job.prompt.nodes)
        # The beginning that is known is counted, the rest estimated.
        tokens = known.tokens + job.prompt.tokens_after[known.node] if known.tokens else job.tokens
        placement = Placement(max(tokens, 1.0), self._random.getrandbits(32))
        items, encoded = _tokens_of(job), job.features is not None
        question = Question(placement, items, encoded, _fused(job), needs.avoid, needs.flags, needs.ahead)
        plan = make_plan(question, self._view(question, known), self._policy)
        return None if plan is None else Made(plan, because, time.monotonic(), placement, known)

    def _missing(self) -> str:
        return ", ".join(self._table.missing()) or "an instance"

    def _view(self, question: Question, known: Known) -> View:
        """What the question needs: of encoders only that they are there, unless it is open who encodes."""
        table = self._table
        idle = () if question.undecided else (Role.E,)
        live = {role: () if role in idle else table.live(role) for role in table.live_roles()}
        flags = {}
        if question.flags is not None:
            flags = {one.id: table.instance(one.id).answer_flags for its in live.values() for one in its}
        cached = {incarnation_id: float(tokens) for incarnation_id, tokens in known.held.items()}
        shares = question.ahead and self._spares_towers and self._tower_shares_cores()
        return View(live, table.wanted, cached, flags, tower_shares_cores=shares)

    def _tower_shares_cores(self) -> bool:
        """Whether encoders compute on cores on which others would prepare a request. One who prepares has a core beside
        it."""
        live = [self._table.instance(one.id) for role in Role for one in self._table.live(role)]
        on_cores = [one for one in live if one.cpu_cores]
        encoders = [one.computes_on for one in on_cores if one.role.sends_features]
        others = [one.computes_on for one in on_cores if one.role.takes_features]
        return any(cores & theirs for cores in encoders for theirs in others)

    def _roles(self) -> View:
        """Who there is, and no more than that."""
        return View(dict.fromkeys(self._table.live_roles(), ()), self._table.wanted)

    def _stands(self, pick: Pick) -> bool:
        return self._table.is_up(pick.chosen.id) and self._table.is_alive(*pick.chosen.incarnation_id)

    def _taken(self, job: Job, made: Made) -> Route:
        plan, table = made.plan, self._table
        job.record.planned(plan, made.because)
        tokens = {"all": made.placement.cost, "known": made.known.tokens, "prefill": plan.head.chosen.cached}
        if plan.tail is not None:
            tokens["decode"] = plan.tail.chosen.cached
        for which, count in tokens.items():
            self._metrics.prefix_tokens.labels(which).inc(count)
        if plan.tail is None:
            return Route(plan.path, None, table.acquire(plan.head.chosen.id, Work.DECODE, plan.left))
        prefill = table.acquire(plan.head.chosen.id, Work.PREFILL, plan.left)
        return Route(plan.path, prefill, table.acquire(plan.tail.chosen.id, Work.DECODE), plan.decode_waits)


def _tokens_of(job: Job) -> tuple[float, ...]:
    return tuple([item.tokens for item in job.items])


def _fused(job: Job) -> bool:
    return job.request.needs_fused is not None
