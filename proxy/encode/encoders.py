"""Calls to encoders: which of them gets which items, one call per item, another one elsewhere when it fails.

Owns back-pressure (an encoder whose store has no room is left alone), the retries, and when an encoder that hangs is
given up. Which items need encoding at all is `proxy/encode/step.py`'s business.

Each item has a call of its own, so that it is known, forwarded and waited for by itself, and fails by itself. They go
out in the order of the prompt, in which the prefill needs them. Only small ones share a call, since a call costs the
proxy time whatever is in it. Within a call each item is still stored and announced when it is done, so a consumer's
prefetch never waits for the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import structs

from epd_serve.errors import DeadlineError, EpdError, StageError
from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from proxy.config.limits import Timeouts
from proxy.context import RequestContext
from proxy.encode.learnt_speeds import LearntSpeeds
from proxy.encode.spread import calls, share_of, spread
from proxy.errors import StageDied, StageFault, most_telling
from proxy.media.loader import LoadedItem
from proxy.metrics import Metrics
from proxy.registry.instance_state import Lease, Work
from proxy.registry.table import InstanceTable
from proxy.request.parse import Endpoint
from proxy.request.payload import encoded
from proxy.routing.policy import Candidate, with_neighbours
from proxy.stages.bodies import encode_body
from proxy.stages.circuits import Circuits
from proxy.stages.client import StageClient
from proxy.stages.retries import RetryBudget

logger = logging.getLogger(__name__)
RELOOK_S = 0.5  # a full store's last report may lapse, and an encoder fall silent, without any news
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EncodeOrder:
    """What is the same for all calls about one request's items.

    Attributes:
        again: keys to be encoded even where an encoder believes that they are there.
        shunned: incarnations of encoders to ask last (they made what got lost).
        done: called for each item with the encoder that has it and its entry of `ec_transfer_params`, or {}.
        is_known: whether a key's feature is there, although the call that was to make it failed.
        waits: called before these items wait apart (`WatchedBody.apart_s`): nobody else must wait for them then.
    """

    ctx: RequestContext
    done: Callable[[LoadedItem, Instance, dict[str, Any]], None]
    is_known: Callable[[str], bool] = lambda _: False
    waits: Callable[[Sequence[LoadedItem]], None] = lambda _: None
    again: frozenset[str] = frozenset()
    shunned: frozenset[str] = frozenset()


class Encoders:
    """All encoders of the table."""

    def __init__(
        self,
        table: InstanceTable,
        stages: StageClient,
        metrics: Metrics,
        timeouts: Timeouts,
        *,
        retries: int,
        circuits: Circuits,
        budget: RetryBudget,
    ) -> None:
        self._table = table
        self._stages = stages
        self._metrics = metrics
        self._timeouts = timeouts
        self._retries = retries
        self._circuits = circuits
        self._budget = budget
        self._speeds = LearntSpeeds()

    async def encode(
        self, order: EncodeOrder, items: Sequence[LoadedItem], tried: frozenset[IncarnationId] = frozenset()
    ) -> None:
        """Have distinct items encoded in parallel, each by its owner or where it is done sooner
        (`proxy/encode/spread.py`), once the encoders take the request.

        An item that fails is tried elsewhere, alone. Items that no encoder produced are logged and counted;
        `order.done` is not called for them.

        Raises:
            StageRefusal: an encoder refuses an item.
        """
        ctx = order.ctx
        if apart_s := ctx.watched.apart_s:
            order.waits(items)
            since = time.monotonic()
            await asyncio.sleep(apart_s)
            ctx.record.took("apart", since)
        if ctx.watched.over:
            self._give_up(order, items, "encoder_failed")
            return
        await ctx.passed.to_encoders()
        await self._encode(order, items, tried)

    async def _encode(self, order: EncodeOrder, items: Sequence[LoadedItem], tried: frozenset[IncarnationId]) -> None:
        encoders, reason = await self._available(order, tried)
        if not encoders:
            self._give_up(order, items, reason)
            return
        costs = [item.tokens for item in items]
        each = share_of(costs, len(encoders))
        workers = with_neighbours([self._with_speed(encoder) for encoder in encoders], each)
        shares = spread([item.key for item in items], costs, workers)
        chosen = [worker.id for worker, share in zip(workers, shares, strict=True) if share]
        order.ctx.record.spread(each, workers, chosen)
        with ExitStack() as leases:
            try:
                async with asyncio.TaskGroup() as group:
                    for worker, part in calls(costs, shares, alone=bool(tried)):
                        called = [items[index] for index in part]
                        # Counted before the first call begins: who chooses next has to see all of them.
                        weight = sum(item.tokens for item in called)
                        lease = self._table.acquire(encoders[worker].id, Work.ENCODE, weight)
                        leases.callback(lease.release)
                        group.create_task(self._encode_at(lease, weight, order, called, tried))
            except BaseExceptionGroup as failed:
                raise most_telling(failed) from None

    async def _available(self, order: EncodeOrder, tried: Collection[IncarnationId]) -> tuple[list[Candidate], str]:
        """Encoders to choose from, or none and why. Waits for room in a store, `encode_s` at most, and in a pause for
        an encoder, which may be on its way."""
        pause = self._table.pause
        until = pause.now() + self._timeouts.encode_s
        waits = False
        while True:
            untried = [encoder for encoder in self._table.live(Role.E) if encoder.incarnation_id not in tried]
            if not untried:
                if pause.left_s:
                    await self._table.changed(pause.left_s)
                    continue
                return [], "encoder_failed" if tried else "no_encoder"
            untried = [encoder for encoder in untried if not self._hangs(encoder.incarnation_id)]
            if not untried:
                return [], "encoder_silent"
            roomy = [encoder for encoder in untried if not encoder.full]
            if roomy:
                preferred = [encoder for encoder in roomy if encoder.incarnation not in order.shunned] or roomy
                return [encoder for encoder in preferred if not encoder.suspended] or preferred, ""
            left_s = until - pause.now()
            if left_s <= 0:
                return [], "store_full"
            self._metrics.store_waits.inc()
            if not waits:
                waits = True
                order.ctx.record.note("waits", line="store", full=len(untried))
            await self._table.changed(min(left_s, RELOOK_S))

    def _with_speed(self, encoder: Candidate) -> Candidate:
        """What it reports of its speed, or what was learnt."""
        return encoder if encoder.rate > 0 else structs.replace(encoder, rate=self._speeds.rate(encoder.incarnation_id))

    async def _encode_at(
        self,
        lease: Lease,
        weight: float,
        order: EncodeOrder,
        items: Sequence[LoadedItem],
        tried: frozenset[IncarnationId],
    ) -> None:
        """One call. Releases `lease`."""
        ctx, instance = order.ctx, lease.instance
        incarnation_id = instance.incarnation_id
        done = 0.0
        self._speeds.begin(incarnation_id, time.monotonic())
        try:
            with ctx.watched.at(incarnation_id, encoding=True) as stay, self._circuits.call(instance):
                try:
                    answer = await self._post(order, instance, items)
                except StageDied as error:
                    ctx.watched.died(stay, incarnation_id, ago_s=error.ago_s)
                    raise
            done = weight
        except (StageError, DeadlineError) as error:
            logger.warning("request %s: %s", ctx.id, error.message)
            ctx.record.failed("encode_failed", error, instance.id)
            if isinstance(error, StageFault) and self._table.is_alive(*incarnation_id):
                self._circuits.acquit(ctx.faults.note(error, incarnation_id))
        finally:
            self._speeds.end(incarnation_id, time.monotonic(), done=done)
            lease.release()
        if done:
            entries = answer.get("ec_transfer_params")
            entries = entries if isinstance(entries, dict) else {}
            for item in items:
                entry = entries.get(item.key)
                order.done(item, instance, entry if isinstance(entry, dict) else {})
            return
        there = {item.key for item in items if order.is_known(item.key)}  # announced before the encoder died
        for item in items:
            if item.key in there:
                order.done(item, instance, {})
        items = [item for item in items if item.key not in there]
        tried = tried | {incarnation_id}
        if not items:
            return
        if len(tried) > self._retries or ctx.watched.over:
            self._give_up(order, items, "encoder_failed")
            return
        if any(other.incarnation_id not in tried for other in self._table.live(Role.E)):
            if not self._budget.withdraw(time.monotonic()):
                self._metrics.retries_refused.inc()
                ctx.record.note("retry_refused", stage=instance.id)
                self._give_up(order, items, "no_retries_left")
                return
            self._metrics.retries.labels(instance.id).inc()
            ctx.record.again("retry", stage=instance.id, of="encode")
        await self.encode(order, items, tried)

    async def _post(self, order: EncodeOrder, instance: Instance, items: Sequence[LoadedItem]) -> dict[str, Any]:
        ctx = order.ctx
        body = encoded(encode_body(ctx.base, items, order.again))
        begun, outcome, span = time.monotonic(), "cancelled", ctx.record.call_span()
        try:
            answer = await self._unless_it_hangs(
                instance,
                self._stages.post(instance, Endpoint.CHAT, body, ctx.headers(span), timeout_s=self._timeouts.encode_s),
            )
            outcome = "ok"
            ctx.record.encoded_by(instance.id)
            return answer
        except EpdError as error:
            outcome = error.code or type(error).__name__
            raise
        finally:
            self._metrics.stage_seconds.labels("E", outcome).observe(time.monotonic() - begun)
            ctx.record.took("encode_call", begun, span=span, stage=instance.id, items=len(items), outcome=outcome)

    def _hangs(self, incarnation_id: IncarnationId) -> bool:
        return self._table.silence_s(*incarnation_id) > self._timeouts.encode_silence_s

    async def _unless_it_hangs(self, instance: Instance, call: Coroutine[Any, Any, Answer]) -> Answer:
        """The call's answer. Raises StageDied when the encoder falls silent meanwhile: its queue may be long, and then
        `encode_s` is right, or its processes may be stopped, and then it is not."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=RELOOK_S))[0]:
                if self._hangs(instance.incarnation_id):
                    silent_s = self._table.silence_s(*instance.incarnation_id)
                    raise StageDied(f"stage {instance.id} has stopped to report", stage=instance.id, ago_s=silent_s)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    def _give_up(self, order: EncodeOrder, items: Sequence[LoadedItem], reason: str) -> None:
        logger.warning("request %s: %d items go on unencoded (%s)", order.ctx.id, len(items), reason)
        self._metrics.encode_fallback.labels(reason).inc(len(items))
        order.ctx.record.note("not_encoded", items=len(items), reason=reason)
