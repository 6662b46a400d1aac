"""One attempt at prefill and decode: D and P at once under one transfer id.

P is called first, which the first token waits for; its packets go straight into blocks that D allots meanwhile. A
stream begins with P's first token where that may be shown (`proxy/generate/recovery.py`), and goes on with D's; one
token P answers alone. Closing a stage's connection cancels it, so cancellation of the task that runs here cancels every
stage, and an attempt that fails has left both when it raises.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any

from epd_serve.errors import DeadlineError, EpdError, StageError
from epd_serve.instances import Instance
from proxy import strict_json
from proxy.context import RequestContext, Services
from proxy.errors import KvNotDelivered, StageTimeout, most_telling
from proxy.generate.recovery import Way, alike, is_one_token, may_be_shown, way_on
from proxy.generate.relay import Client, relay, show
from proxy.generate.router import Route
from proxy.metrics import Metrics
from proxy.records.record import Record
from proxy.registry.instance_state import Lease
from proxy.request.client import CancelScope
from proxy.stages.bodies import After, decode_body, first_token_body, fused_body, prefill_body, public_answer, with_ids
from proxy.stages.circuits import StageCall
from proxy.stages.history import AnotherAnswerError
from proxy.strict_json import Pieces, encoded

logger = logging.getLogger(__name__)
PREFILL_LINGER_S = 5.0


class Attempt:
    """One attempt, on the instances of `route`, from the body `base`; after what the client has, if it has something.

    Args:
        before_decode: what D is to wait for, where P need not.
    """

    def __init__(
        self,
        services: Services,
        ctx: RequestContext,
        base: Mapping[str, Any],
        route: Route,
        before_decode: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        history, settings, circuits = ctx.history, services.settings, services.circuits
        self._services = services
        self._ctx = ctx
        self._base = base
        self._route = route
        self._before_decode = before_decode
        self._decoding = circuits.call(route.decode.instance)
        self._prefilling = circuits.call(route.prefill.instance) if route.prefill is not None else None
        self.calls = (self._decoding,) if self._prefilling is None else (self._prefilling, self._decoding)
        self._opening = asyncio.Lock()
        self._answer: asyncio.Task[None] | None = None
        self._after: After | None = None
        flags = route.decode.instance.answer_flags
        keeps = history.goes_on and settings.go_on != "never" and flags is not None
        self._prefill_shows = settings.first_token == "prefill"
        self._shows = not history.begun and self._prefill_shows and may_be_shown(ctx.request, route)
        if history.begun:
            self._after = After(history.tokens, way_on(ctx.request, history, settings.go_on) is Way.REPLAY)
        else:
            history.flags = flags
        self._asks_ids = keeps or self._shows or history.begun
        self._client = Client(
            ctx.sink,
            history,
            hides=self._asks_ids and not ctx.request.body.get("return_token_ids"),
            keeps=keeps,
        )

    async def run(self) -> None:
        """Answer the request.

        Raises:
            StageError: a stage failed or hung, with another attempt possible or not (`sink.repeatable`). StageRefusal.
        """
        watchdog = self._services.watchdog
        scope: CancelScope[StageError] = CancelScope()
        self._services.metrics.paths.labels(self._route.path.name).inc()
        watchdog.watch(scope, self._ctx.sink, self.calls)
        try:
            with scope:
                await self._run()
                return
            assert scope.reason is not None, "nothing else swallows an end"
            raise scope.reason
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None
        finally:
            watchdog.unwatch(scope)
            for call in self.calls:
                call.over()

    async def _run(self) -> None:
        route, prefill, prefilling, after = self._route, self._route.prefill, self._prefilling, self._after
        body = with_ids(self._base) if self._asks_ids else self._base
        if prefill is None or prefilling is None:
            await self._alone(route.decode, body if after is None else fused_body(body, after), self._decoding)
        elif after is None and self._prefill_shows and is_one_token(self._ctx.request) and alike(route):
            route.decode.release()
            await self._alone(prefill, body, prefilling)
        else:
            await self._both(prefill, prefilling, body)

    def _dispatched(self, transfer_id: str = "") -> None:
        route, record = self._route, self._ctx.record
        head, decode = (route.prefill or route.decode).instance.id, route.decode.instance.id
        record.attempted(route.path.name, head if route.prefill is not None else "", decode, transfer_id)
        prompt_tokens, item_tokens = self._services.table.step_budgets(head)
        if prompt_tokens:  # it holds its steps to an SLO, and this request with them
            record.note("step_budgets", stage=head, prompt_tokens=prompt_tokens, item_tokens=item_tokens)

    async def _alone(self, lease: Lease, body: Mapping[str, Any], call: StageCall) -> None:
        if not self._ctx.request.stream:
            self._ctx.passed.prefilled()  # nobody can tell when
        payload = encoded(body)
        self._dispatched()
        await self._answers(lease, payload, call)

    async def _both(self, prefill: Lease, prefilling: StageCall, body: Mapping[str, Any]) -> None:
        after, shows, sender, request = self._after, self._shows, prefill.instance, self._ctx.request
        transfer_id = secrets.token_hex(16)
        if shows:
            to_prefill = encoded(first_token_body(self._base, transfer_id, sender))
        else:
            to_prefill = encoded(prefill_body(self._base, transfer_id, sender, request.endpoint, after))
        to_decode = encoded(decode_body(body, transfer_id, sender, first_token=shows, after=after))
        self._dispatched(transfer_id)

        async def answers() -> None:
            if self._before_decode is not None:
                await self._before_decode()
                self._ctx.record.note("decode_sent")
            await self._answers(self._route.decode, to_decode, self._decoding)

        async with asyncio.TaskGroup() as group:
            prefilled = group.create_task(self._prefills(prefill, to_prefill, prefilling))
            self._answer = group.create_task(answers())
            await asyncio.wait([self._answer])
            # P's answer is of no interest any more, its tidy end is.
            if not (prefilled.done() or self._answer.cancelled()):
                await asyncio.wait([prefilled], timeout=PREFILL_LINGER_S)
                prefilled.cancel()

    async def _prefills(self, lease: Lease, body: bytes | Pieces, call: StageCall) -> None:
        """Run P. Its failure fails the attempt while D cannot answer without it, or does not: no longer when the client
        has D's first byte."""
        instance, ctx = lease.instance, self._ctx
        try:
            with self._called("prefilled", lease) as span, call:
                if self._shows:
                    await self._show(instance, body, call, span)
                else:
                    await self._deliver(instance, body, span)
            ctx.passed.prefilled()
        except EpdError as error:
            if isinstance(error, KvNotDelivered):
                self._services.metrics.kv_failed(error.reason)
            assert self._answer is not None, "both are called at once"
            if self._answer.cancelling() or not (self._decoding.judged or ctx.sink.finished):
                if isinstance(error, DeadlineError):
                    raise StageTimeout(error.message, stage=instance.id) from error
                raise
            logger.warning("request %s: after the first token, %s", ctx.id, error.message)

    async def _deliver(self, instance: Instance, body: bytes | Pieces, span: str) -> None:
        """Have P send its KV. Raises KvNotDelivered where its answer says that it could not."""
        ctx = self._ctx
        answer = await self._services.stages.post(
            instance, ctx.request.endpoint, body, ctx.headers(span), timeout_s=None
        )
        ctx.record.cached_tokens = _cached_tokens(answer)
        params = answer.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("ok") is False:
            raise KvNotDelivered(str(params.get("reason") or "no reason given"), stage=instance.id)

    async def _show(self, instance: Instance, body: bytes | Pieces, call: StageCall, span: str) -> None:
        """Have P send its KV, and show its first token. Where that is all, D is left."""
        ctx = self._ctx

        def first() -> None:
            call.succeeded()
            self._first_byte(instance)

        def whole() -> None:
            assert self._answer is not None, "both are called at once"
            self._answer.cancel()
            ctx.watched.answered()

        stream = self._services.stages.events(instance, ctx.request.endpoint, body, ctx.headers(span))
        async with aclosing(stream) as events:
            await show(
                events,
                self._client,
                ctx.request.body,
                stage=instance.id,
                opening=self._opening,
                on_first=first,
                on_whole=whole,
            )

    async def _answers(self, lease: Lease, body: bytes | Pieces, call: StageCall) -> None:
        """Have the client answered by who decodes."""
        ctx = self._ctx
        with self._called("answered", lease) as span, call:
            try:
                if ctx.request.stream:
                    return await self._relay(lease.instance, body, call, span)
                answer = await self._services.stages.post(
                    lease.instance,
                    ctx.request.endpoint,
                    body,
                    ctx.headers(span),
                    timeout_s=None,
                    decode=strict_json.fields,
                )
            except DeadlineError as error:
                # Before P has answered, it is P for whom D waits.
                late = next(one for one in self.calls if one is call or not one.judged)
                late.failed()
                raise StageTimeout(error.message, stage=late.incarnation_id[0]) from error
        ctx.watched.answered()
        keep = bool(ctx.request.body.get("return_token_ids"))
        await ctx.sink.respond_json(200, public_answer(answer, keep_token_ids=keep))

    async def _relay(self, instance: Instance, body: bytes | Pieces, call: StageCall, span: str) -> None:
        ctx, history = self._ctx, self._ctx.history
        first_tokens = self._services.metrics.first_token_streams

        def news() -> None:
            history.answers += 1
            ctx.watched.answered()
            if self._answer is not None and history.answers == 1:
                first_tokens.labels("kept" if ctx.sink.committed else "decode").inc()
            if not ctx.sink.committed:
                self._first_byte(instance)
            elif history.lost_at is not None:
                self._went_on(instance, history.lost_at)

        stream = self._services.stages.events(instance, ctx.request.endpoint, body, ctx.headers(span))
        async with aclosing(stream) as events:
            try:
                await relay(
                    events,
                    self._client,
                    stage=instance.id,
                    on_first=call.succeeded,
                    on_news=news,
                    opening=self._opening,
                )
            except AnotherAnswerError:
                if not history.answers:
                    first_tokens.labels("other").inc()
                raise

    def _called(self, event: str, lease: Lease) -> _Called:
        return _Called(event, lease, self._ctx.record, self._services.metrics)

    def _went_on(self, instance: Instance, lost_at: float) -> None:
        """The client's stream goes on, from this instance."""
        history = self._ctx.history
        gap_s, history.lost_at = time.monotonic() - lost_at, None
        way = way_on(self._ctx.request, history, self._services.settings.go_on).value
        self._services.metrics.migrated(way, gap_s)
        self._ctx.record.went_on(instance.id, way=way, tokens=len(history.tokens), gap_s=gap_s)

    def _first_byte(self, instance: Instance) -> None:
        self._ctx.passed.prefilled()
        self._services.metrics.first_tokens.labels(instance.role.value).inc()
        self._ctx.record.first_byte(instance.id)


class _Called:
    """The time of a call, whose span entering gives: what it took and how it ended is noted, and its place is free
    afterwards."""

    __slots__ = ("_begun", "_event", "_lease", "_metrics", "_record", "_span")

    def __init__(self, event: str, lease: Lease, record: Record, metrics: Metrics) -> None:
        self._event = event
        self._lease = lease
        self._record = record
        self._metrics = metrics

    def __enter__(self) -> str:
        self._begun = time.monotonic()
        self._span = self._record.call_span()
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        instance, outcome = self._lease.instance, "cancelled"
        if error is None:
            outcome = "ok"
        elif isinstance(error, EpdError):
            outcome = error.code or type(error).__name__
        self._lease.release()
        took_s = self._record.took(self._event, self._begun, span=self._span, stage=instance.id, outcome=outcome)
        self._metrics.stage_seconds.observe((instance.role.value, outcome), took_s)


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """Prompt tokens that a stage found in its prefix cache, where it says so (`--enable-prompt-tokens-details`)."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None
