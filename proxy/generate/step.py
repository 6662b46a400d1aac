"""The prefill and decode step: attempts until one succeeds, repeated before the first byte. After it one follows only
where it can go on after what the client has.

What follows a failure, and how the media is delivered then, is `proxy/generate/recovery.py`'s to say; one attempt is
`proxy/generate/attempt.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from functools import partial

from msgspec.structs import replace

from epd_serve.errors import EpdError, StageError
from epd_serve.instances import IncarnationId
from epd_serve.roles import Role
from proxy.context import Delivery, RequestContext, Services
from proxy.encode.step import EncodeStep
from proxy.errors import KvNotDelivered, StageDied, StageFault, StageRefusal, StageUnreachable
from proxy.generate.attempt import Attempt
from proxy.generate.recovery import (
    Failure,
    MigrationPace,
    Next,
    Way,
    delivered,
    goes_as_metadata,
    next_delivery,
    next_step,
    way_on,
    why_not,
)
from proxy.generate.relay import Client
from proxy.generate.router import Route, Router
from proxy.request.client import CancelScope
from proxy.request.parse import ParsedRequest
from proxy.stages.history import HistoryRoom, TokenHistory
from proxy.stages.poison import Stay, faulty_body
from proxy.stages.sse import DONE_EVENT, Event

logger = logging.getLogger(__name__)
BACKOFF_S = 0.2
REPROBE_S = 1.0


class GenerateStep:
    """Answers requests through their sinks, or raises what to answer instead."""

    def __init__(self, services: Services, router: Router, encode: EncodeStep) -> None:
        self._services = services
        self._settings = settings = services.settings
        self._metrics = services.metrics
        self._router = router
        self._encode = encode
        self._history_room = HistoryRoom(settings.migration)
        self._pace = MigrationPace(settings.migration)

    def history(self, request: ParsedRequest) -> TokenHistory:
        """Of the answer to `request`, of which its client has nothing yet."""
        return TokenHistory(self._history_room, why_not=why_not(request))

    async def run(self, ctx: RequestContext) -> None:
        """Attempt until one succeeds, the client has its first byte, or the retries are used up.

        Where the items of `ctx` are being encoded, the first attempt goes ahead of their end if that is of use; what
        comes of that attempt, the next one follows the end.
        """
        history = ctx.history
        ctx.sink.goes_on = lambda: history.goes_on
        ctx.delivery = next_delivery(ctx, self._settings)
        try:
            if ctx.encoding is not None and not await self._goes_ahead(ctx):
                await self._encoded(ctx)
            await ctx.passed.to_stages()
            ctx.record.note("admitted")
            while not await self._answered(ctx):
                pass
        finally:
            if history.lost_at is not None:
                self._metrics.migrations.labels(self._way(ctx).value, "failed").inc()
            history.close()

    async def _answered(self, ctx: RequestContext) -> bool:
        """Make an attempt. Returns whether the client has its answer, or its end; else another one is to follow."""
        await _stay_apart(ctx)
        ctx.watched.check()  # other copies may have been tried meanwhile
        await ctx.passed.to_stages()  # to wait, to encode after all, or again, is to give the place back
        failure: Failure | None = None
        with await self._router.route(ctx) as route:
            # An instance that encodes for itself takes the media, and nothing but the media.
            delivery = ctx.delivery if route.path.encode else Delivery.PIXELS
            before, began = ctx.history.answers, time.monotonic()
            with ctx.watched.at(*[instance.incarnation_id for instance in route.instances]) as stay:
                try:
                    if _may_run(ctx, route) and await self._ran(ctx, delivery, route):
                        return True
                except (StageError, StageRefusal) as error:
                    stage, took_s = _stage_of(error, route), time.monotonic() - began
                    ctx.record.failed("failed", error, stage, s=took_s, delivery=delivery.value)
                    failure = Failure(
                        error.with_traceback(None),  # whose frames hold the request's media
                        delivery,
                        asyncio.get_running_loop().time(),
                        repeatable=ctx.sink.repeatable,
                        told=ctx.history.answers != before,
                        shared_death=ctx.sink.repeatable and self._shares_death(stay, error, route),
                        listening=self._services.dispatcher.listening,
                        went_ahead=ctx.encoding is not None,
                    )
        if failure is None:  # it went ahead and was cut, or its items are to be encoded first
            await self._encoded(ctx)
            return False
        return await self._goes_on(ctx, failure, route)

    async def _ran(self, ctx: RequestContext, delivery: Delivery, route: Route) -> bool:
        """Run an attempt. False: it went ahead, and had to be cut."""
        if ctx.items and route.path.encode:
            self._metrics.deliveries.labels(delivery.value).inc()
        base = delivered(ctx, delivery, self._settings) if route.path.encode else ctx.base
        if ctx.encoding is None:
            await Attempt(self._services, ctx, base, route).run()
            return True
        outcome, scope = "failed", CancelScope[str]()

        def cut() -> None:
            if not ctx.sink.committed:  # else the features were there
                scope.cancel("its features will not come as expected")

        first_stored = partial(self._encode.first_stored, ctx) if route.decode_waits else None
        try:
            with scope, ctx.passed.cut_by(cut):
                await Attempt(self._services, ctx, base, route, first_stored).run()
                outcome = "answered"
                return True
            outcome = "cut"
            return False
        finally:
            self._metrics.went_ahead.labels(outcome).inc()
            ctx.record.note("went_ahead", outcome=outcome)

    async def _goes_on(self, ctx: RequestContext, failed: Failure, route: Route) -> bool:
        """Prepare what follows a failed attempt. Returns as `_answered`. Raises what to answer if nothing follows."""
        error, stage = failed.error, _stage_of(failed.error, route)
        alike: frozenset[IncarnationId] = frozenset()
        if failed.repeatable and not failed.told:
            if failed.went_ahead:
                await self._encoded(ctx)
            ctx.watched.check()
            if isinstance(error, StageError) and failed.may_lack_features:
                failed = replace(failed, missing=await self._services.dispatcher.missing_for(ctx.id))
            needs_none = failed.delivery is Delivery.PIXELS or not (self._settings.stages_encode or failed.missing)
            if isinstance(error, StageFault) and needs_none:  # else it may lack a feature
                alike = self._alike(ctx, error, route)
                failed = replace(failed, alike=bool(alike))
        # Without the words of a stage, which may quote the request.
        ctx.because = f"{stage}: {error.code or type(error).__name__}"
        step = next_step(failed, ctx, self._settings)
        match step:
            case Next.GIVE_UP:
                self._note_end(ctx, failed)
                raise error
            case Next.BLAME:
                assert isinstance(error, StageFault), "what two say alike"
                self._services.circuits.acquit(alike)
                raise faulty_body(error)
            case Next.END:
                await self._end(ctx)
                return True
            case Next.GO_ON:
                ctx.avoid.add(route.incarnation_of(stage))
                await self._moves(ctx)
            case Next.REPEAT:
                pass
            case Next.ENCODE_AGAIN | Next.SEND_PIXELS:
                if isinstance(error, StageError) and failed.missing is None:
                    ctx.avoid.add(route.incarnation_of(stage))
                await self._step_down(ctx, failed, step)
            case Next.PROBE | Next.ELSEWHERE | Next.RETRY:
                ctx.avoid.add(route.incarnation_of(stage))
                await self._again(ctx, failed, step)
        logger.warning("request %s: %s; next: %s", ctx.id, error.message, step.value)
        return False

    async def _end(self, ctx: RequestContext) -> None:
        """The stage is gone, and the client has all but the end of its stream."""
        history = ctx.history
        history.migrations += 1
        self._metrics.migrated(Way.NONE.value, time.monotonic() - history.last_at)
        ctx.record.went_on("", way=Way.NONE.value, tokens=len(history.tokens), gap_s=0.0)
        await ctx.sink.finish(Client(ctx.sink, history).take([Event(DONE_EVENT)]))

    async def _moves(self, ctx: RequestContext) -> None:
        """Another stage is to go on with the stream. The client got something: what failed before counts no more."""
        history = ctx.history
        ctx.failures, ctx.probing_until, ctx.doubted = 0, None, False
        history.lost_at = history.last_at
        history.migrations += 1
        ctx.answer_tokens = len(history.tokens) if self._way(ctx) is Way.FAST else 0
        if ctx.encoding is not None:
            await self._encoded(ctx)
        await self._pace.turn()

    async def _step_down(self, ctx: RequestContext, failed: Failure, step: Next) -> None:
        """Choose the next delivery after one that a lost feature may have failed. Both stages have been left."""
        error, missing, directory = failed.error, failed.missing, self._services.dispatcher.directory
        lost = missing.keys if missing is not None else [item.key for item in ctx.items]
        if isinstance(error, StageRefusal):  # with the media, the stage judges what the client wrote
            directory.distrust(lost)
        elif missing is not None or not failed.listening:
            directory.lost(lost)
        if step is Next.ENCODE_AGAIN:
            ctx.encoded_again += 1
            await self._encode.again(ctx, lost)
            ctx.delivery = next_delivery(ctx, self._settings, failed.delivery)
        else:
            if missing is not None and ctx.features is not None:
                ctx.features = ctx.features.without(missing.keys)
            ctx.delivery = Delivery.PIXELS
        cause = missing.cause if missing is not None else error.code or "refused"
        self._metrics.step_downs.labels(failed.delivery.value, ctx.delivery.value, cause).inc()
        ctx.record.again("step_down", cause=cause, before=failed.delivery.value, then=ctx.delivery.value)

    async def _again(self, ctx: RequestContext, failed: Failure, step: Next) -> None:
        """Count a retry, pay for it and plan it; wait where the same instance is to be tried. Raises the failure where
        that cannot be."""
        error = failed.error
        assert isinstance(error, StageError), "a refusal is not tried again"
        ctx.plan = self._router.plan(ctx)
        clear = ctx.plan is not None and ctx.plan.clear
        pause_s, ctx.doubted = REPROBE_S, ctx.doubted or failed.may_lack_features
        if step is Next.PROBE:
            ctx.probing_until = ctx.probing_until or failed.at + self._settings.timeouts.instance_wait_s
        else:
            ctx.failures += not failed.shared_death
            pause_s = BACKOFF_S * max(1, ctx.failures)
            if step is Next.ELSEWHERE and not clear:
                raise error
            if not self._services.budget.withdraw(time.monotonic()):
                self._metrics.retries_refused.inc()
                ctx.record.note("retry_refused", stage=error.stage)
                raise error
        self._metrics.retries.labels(error.stage).inc()
        ctx.record.again("retry", stage=error.stage, failures=ctx.failures, of="attempt")
        if not clear:  # the same instance: after the launcher's word about it, or a little later
            ctx.plan = None
            await self._services.table.changed(pause_s * random.uniform(0.5, 1.0))

    def _note_end(self, ctx: RequestContext, failed: Failure) -> None:
        """A stream that has begun ends with its stage."""
        history = ctx.history
        if not isinstance(failed.error, StageError):
            return
        if failed.told and failed.repeatable:
            history.lost_at = history.last_at
            ctx.record.note("stays", reason=f"it has moved {history.migrations} times")
        elif not failed.repeatable and ctx.request.stream and history.why_not:
            self._metrics.migrations.labels(Way.NONE.value, "failed").inc()
            ctx.record.note("stays", reason=history.why_not)

    def _way(self, ctx: RequestContext) -> Way:
        return way_on(ctx.request, ctx.history, self._settings.go_on)

    async def _goes_ahead(self, ctx: RequestContext) -> bool:
        """Whether to call P and D now, while encoders work: waits until the metadata of all items is known, or the
        encoding has ended. A suspect takes one step at a time, or nobody could tell of which an instance died."""
        settings = self._settings
        if settings.overlap == "never" or not goes_as_metadata(ctx, settings) or ctx.watched.suspected:
            return False
        if not await self._encode.metadata_known(ctx):
            return False
        if next_delivery(ctx, settings) is not Delivery.METADATA or ctx.watched.suspected:
            return False
        if any(encoder.full for encoder in self._services.table.live(Role.E)) or not ctx.passed.goes_ahead():
            return False
        ctx.delivery, ctx.because = Delivery.METADATA, "its items are being encoded"
        return True

    async def _encoded(self, ctx: RequestContext) -> None:
        """The encoding's end; where none has begun, since whoever would have encoded it itself is gone, all of it."""
        encoding, ctx.encoding = ctx.encoding, None
        await (encoding if encoding is not None else self._encode.run(ctx))
        ctx.because = "its items are encoded"
        ctx.delivery = next_delivery(ctx, self._settings)

    def _shares_death(self, stay: Stay, error: StageError | StageRefusal, route: Route) -> bool:
        """Where the failure was the end of an instance, hold it against who was there. Returns whether that is news,
        and others were there too."""
        if not isinstance(error, StageError) or isinstance(error, StageUnreachable | KvNotDelivered):
            return False
        incarnation_id = route.incarnation_of(error.stage)
        if not isinstance(error, StageDied) and self._services.table.is_alive(*incarnation_id):
            return False
        return stay.body.died(stay, incarnation_id, ago_s=error.ago_s if isinstance(error, StageDied) else 0.0)

    def _alike(self, ctx: RequestContext, fault: StageFault, route: Route) -> frozenset[IncarnationId]:
        """Live instances that failed with the same words as this one, which it is among; none while it is alone."""
        incarnation_id = route.incarnation_of(fault.stage)
        return ctx.faults.note(fault, incarnation_id) if self._services.table.is_alive(*incarnation_id) else frozenset()


async def _stay_apart(ctx: RequestContext) -> None:
    """Wait where those who shared its deaths are not to be met again: without a place, unless its stream has begun."""
    if apart_s := ctx.watched.apart_s:
        if not ctx.history.begun:
            ctx.passed.give_back()
        since = time.monotonic()
        await asyncio.sleep(apart_s)
        ctx.record.took("apart", since)


def _may_run(ctx: RequestContext, route: Route) -> bool:
    """Whether the items are as far as this route wants them. Only who hears encoders can wait for them."""
    if ctx.encoding is None:
        return not route.path.encode or ctx.features is not None
    waits = route.path.encode and not ctx.encoding.done()
    return waits and all(instance.role.takes_features for instance in route.instances)


def _stage_of(error: EpdError, route: Route) -> str:
    return error.stage if isinstance(error, StageError) else route.decode.instance.id
