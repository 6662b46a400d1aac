"""Plans for requests over the instances of one table, and the wait for a missing role: `proxy/routing/plan.py` meets
the table here.

A request has one plan at a time (`RequestContext.plan`). It stands while the request has not changed what it went by,
its instances are up, and for `STANDS_S`, since they are not counted as busy before it is taken; then the next attempt
has a new one. Where heads that encode for themselves stand beside others, a plan is made before the items are encoded,
since who encodes follows from where the request goes.
"""

from __future__ import annotations

import random
import time
from types import TracebackType
from typing import Self

from msgspec import Struct

from epd_serve.errors import NoInstanceError
from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from proxy.admission.queue import Stage
from proxy.context import RequestContext, Services
from proxy.registry.instance_state import Lease, Work
from proxy.routing.plan import Path, Plan, Question, View, make_plan, ways

STANDS_S = 0.05


class Route(Struct, frozen=True):
    """The instances of one attempt, counted as busy until its context is left.

    Attributes:
        decode_waits: D is to be called when the first item is encoded.
    """

    path: Path
    prefill: Lease | None
    decode: Lease
    decode_waits: bool = False

    @property
    def instances(self) -> list[Instance]:
        return [lease.instance for lease in (self.decode, self.prefill) if lease is not None]

    def incarnation_of(self, stage: str) -> IncarnationId:
        """Of the instance of this id, which is one of the route's."""
        return next(one.incarnation_id for one in self.instances if one.id == stage)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.decode.release()
        if self.prefill is not None:
            self.prefill.release()


class Router:
    """Plans over the instances of one table."""

    def __init__(self, services: Services) -> None:
        self._table = services.table
        self._metrics = services.metrics
        self._settings = services.settings
        self._random = random.Random()

    def encodes_apart(self, ctx: RequestContext) -> bool:
        """Whether the items of `ctx` are to go to encoders before it goes elsewhere. Plans it where that follows from
        no less."""
        if not ctx.items:
            return False
        roles = View(dict.fromkeys(self._table.live_roles(), ()), self._table.wanted)
        possible = ways(_question(ctx, ctx.tokens), roles)
        if len(possible) == 1:
            return True in possible
        ctx.plan = self.plan(ctx)
        if ctx.plan is None or not ctx.plan.path.encode:
            return False
        ctx.record.planned(ctx.plan)
        return True

    async def route(self, ctx: RequestContext) -> Route:
        """The route of the plan that stands, or of a new one. Waits up to `instance_wait_s` for a missing role, and as
        long as a pause takes. Raises NoInstanceError after that.
        """
        plan, ctx.plan = ctx.plan, None
        if plan is None or not self._stands(ctx, plan):
            plan = self.plan(ctx)
            if plan is None:
                ctx.passed.leased(Stage.SERVE)  # nobody else waits for it meanwhile
                plan = await self._awaited(ctx)
        return self._taken(ctx, plan)

    def plan(self, ctx: RequestContext) -> Plan | None:
        """A plan through what is live now, None where a role is missing. Nothing is counted as busy by it."""
        known = self._table.prefixes.known(ctx.prompt.nodes)
        # The beginning that is known is counted, the rest estimated.
        tokens = known.tokens + ctx.prompt.tokens_after[known.node] if known.tokens else ctx.tokens
        question, table = _question(ctx, tokens + ctx.answer_tokens), self._table
        # Of encoders only that they are there, unless it is open who encodes.
        idle = () if question.undecided else (Role.E,)
        live = {role: () if role in idle else table.live(role) for role in table.live_roles()}
        flags = {}
        if question.flags is not None:
            flags = {one.id: table.instance(one.id).answer_flags for its in live.values() for one in its}
        view = View(
            live,
            table.wanted,
            known.tokens,
            {incarnation_id: float(tokens) for incarnation_id, tokens in known.held.items()},
            flags,
            tower_shares_cores=question.ahead and self._settings.overlap == "auto" and self._tower_shares_cores(),
            draw=self._random.getrandbits(32),
            at=time.monotonic(),
        )
        return make_plan(question, view, self._settings.policy, ctx.because)

    async def _awaited(self, ctx: RequestContext) -> Plan:
        now = self._table.pause.now
        until, since, missing = now() + self._settings.timeouts.instance_wait_s, time.monotonic(), self._missing()
        try:
            while (left_s := until - now()) > 0:
                await self._table.changed(left_s)
                if (plan := self.plan(ctx)) is not None:
                    return plan
            raise NoInstanceError(f"no live instance: {self._missing()} is missing; try again later")
        finally:
            ctx.record.took("waited", since, missing=missing)

    def _missing(self) -> str:
        return ", ".join(self._table.missing()) or "an instance"

    def _tower_shares_cores(self) -> bool:
        """Whether encoders compute on cores on which others would prepare a request. One who prepares has a core beside
        it."""
        live = [self._table.instance(one.id) for role in Role for one in self._table.live(role)]
        on_cores = [one for one in live if one.cpu_cores]
        encoders = [one.computes_on for one in on_cores if one.role.sends_features]
        others = [one.computes_on for one in on_cores if one.role.takes_features]
        return any(cores & theirs for cores in encoders for theirs in others)

    def _stands(self, ctx: RequestContext, plan: Plan) -> bool:
        return (
            time.monotonic() - plan.made_at <= STANDS_S
            and plan.question == _question(ctx, plan.question.tokens)
            and all(
                self._table.is_up(one.id) and self._table.is_alive(*one.incarnation_id)
                for one in (pick.chosen for pick in plan.picks)
            )
        )

    def _taken(self, ctx: RequestContext, plan: Plan) -> Route:
        table, head, tail = self._table, plan.head.chosen, plan.tail.chosen if plan.tail is not None else None
        ctx.record.planned(plan)
        prefix_tokens = self._metrics.prefix_tokens.counts
        prefix_tokens["all",] += plan.question.tokens
        prefix_tokens["known",] += plan.known
        prefix_tokens["prefill",] += head.cached
        ctx.due()
        passed, kv = ctx.passed, {Work.KV: plan.question.tokens}
        ahead = {Work.AHEAD: plan.left} if passed.ahead else {}
        if tail is None:
            prefill, decode = None, table.acquire(head.id, Work.DECODE, plan.left, {**kv, **ahead})
        else:
            prefix_tokens["decode",] += tail.cached
            prefill = table.acquire(head.id, Work.PREFILL, plan.left, ahead)
            decode = table.acquire(tail.id, Work.DECODE, 1.0, kv)
        passed.leased(Stage.SERVE, prefill or decode)
        return Route(plan.path, prefill, decode, plan.decode_waits)


def _question(ctx: RequestContext, tokens: float) -> Question:
    """`tokens`: of the prompt."""
    return Question(
        max(tokens, 1.0),
        tuple([item.tokens for item in ctx.items]),
        encoded=ctx.features is not None,
        fused=ctx.request.needs_fused is not None,
        avoid=frozenset(ctx.avoid),
        flags=ctx.history.flags if ctx.history.begun else None,
        ahead=ctx.encoding is not None,
    )
