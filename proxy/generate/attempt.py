"""One attempt at prefill and decode: D and P at once under one transfer id.

P is called first, which the first token waits for; its packets go straight into blocks that D allots meanwhile. A
stream begins with P's first token where that may be shown (`proxy/generate/first_token.py`), and goes on with D's; one
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
from functools import partial
from typing import Any, NamedTuple

from epd_serve.errors import DeadlineError, EpdError, StageError
from epd_serve.instances import Instance
from epd_serve.trace import Trace
from proxy.background import Background
from proxy.config.limits import Timeouts
from proxy.errors import KvNotDelivered, StageTimeout, most_telling
from proxy.generate.continuation import AnotherAnswerError
from proxy.generate.first_token import alike, is_one_token, may_be_shown
from proxy.generate.migration import Way, way_on
from proxy.generate.relay import Client, relay, show
from proxy.generate.router import Route
from proxy.generate.stall_watchdog import StallWatchdog
from proxy.generate.token_history import TokenHistory
from proxy.metrics import Metrics
from proxy.registry.instance_state import Lease
from proxy.registry.table import InstanceTable
from proxy.request.cancel_scope import CancelScope
from proxy.request.client_sink import ClientSink
from proxy.request.payload import Pieces, encoded
from proxy.stages.bodies import (
    After,
    decode_body,
    first_token_body,
    fused_body,
    prefill_body,
    public_answer,
    with_ids,
)
from proxy.stages.circuits import Circuits, StageCall
from proxy.stages.client import StageClient
from proxy.stages.job import Job

logger = logging.getLogger(__name__)
PREFILL_LINGER_S = 5.0


class Attempt:
    """Runs attempts; holds nothing of any of them."""

    def __init__(
        self,
        table: InstanceTable,
        stages: StageClient,
        circuits: Circuits,
        timeouts: Timeouts,
        metrics: Metrics,
        trace: Trace,
        background: Background,
        *,
        first_token: str = "prefill",
        go_on: str = "auto",
    ) -> None:
        self._table = table
        self._watchdog = StallWatchdog(table, timeouts.stage_silence_s, background)
        self._stages = stages
        self._circuits = circuits
        self._metrics = metrics
        self._trace = trace
        self._prefill_shows = first_token == "prefill"
        self._go_on = go_on

    async def run(
        self,
        job: Job,
        base: Mapping[str, Any],
        route: Route,
        sink: ClientSink,
        history: TokenHistory,
        before_decode: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Answer `job` from the body `base` on the instances of `route`.

        Args:
            history: what the client has, after which the answer goes on. before_decode: what D is to wait for, where P
                need not.

        Raises:
            StageError: a stage failed or hung, with another attempt possible or not (`sink.repeatable`). StageRefusal.
        """
        self._metrics.paths.labels(route.path.name).inc()
        prefill_id = route.prefill.instance.id if route.prefill is not None else None
        job.record.attempted(route.path.name, prefill_id, route.decode.instance.id)
        head = prefill_id or route.decode.instance.id
        prompt_tokens, item_tokens = self._table.step_budgets(head)
        if prompt_tokens:  # it holds its steps to an SLO, and this request with them
            job.record.note("step_budgets", stage=head, prompt_tokens=prompt_tokens, item_tokens=item_tokens)
        decoding = self._circuits.call(route.decode.instance)
        prefilling = self._circuits.call(route.prefill.instance) if route.prefill is not None else None
        calls = (decoding,) if prefilling is None else (prefilling, decoding)
        cancel_scope: CancelScope[StageError] = CancelScope()
        self._watchdog.watch(cancel_scope, sink, calls)
        try:
            with cancel_scope:
                await self._run(job, base, route, sink, history, decoding, prefilling, before_decode)
                return
            assert cancel_scope.reason is not None, "nothing else swallows an end"
            raise cancel_scope.reason
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None
        finally:
            self._watchdog.unwatch(cancel_scope)
            for call in calls:
                call.over()

    async def _run(
        self,
        job: Job,
        base: Mapping[str, Any],
        route: Route,
        sink: ClientSink,
        history: TokenHistory,
        decoding: StageCall,
        prefilling: StageCall | None,
        before_decode: Callable[[], Awaitable[None]] | None,
    ) -> None:
        flags = route.decode.instance.answer_flags
        keeps = history.goes_on and self._go_on != "never" and flags is not None
        if not history.begun:
            history.flags = flags
        shows = route.prefill is not None and not history.begun and self._prefill_shows
        shows = shows and may_be_shown(job.request, route)
        asks = keeps or shows or history.begun
        after = self._after(job, history)
        client = Client(sink, history, hides=asks and not job.request.body.get("return_token_ids"), keeps=keeps)
        to_decode = with_ids(base) if asks else base
        if route.prefill is None or prefilling is None:
            to_fused = to_decode if after is None else fused_body(to_decode, after)
            await self._answer_alone(job, to_fused, route, route.decode, client, decoding)
        elif self._prefill_shows and is_one_token(job.request) and alike(route) and after is None:
            route.decode.release()
            await self._answer_alone(job, to_decode, route, route.prefill, client, prefilling)
        else:
            bodies = _Bodies(base, to_decode, after, shows)
            await self._run_both(job, bodies, route, route.prefill, client, decoding, prefilling, before_decode)

    def _after(self, job: Job, history: TokenHistory) -> After | None:
        if not history.begun:
            return None
        history.fold()
        return After(history.tokens, way_on(job.request, history, self._go_on) is Way.REPLAY)

    async def _answer_alone(
        self, job: Job, body: Mapping[str, Any], route: Route, lease: Lease, client: Client, call: StageCall
    ) -> None:
        if not job.request.stream:
            job.passed.prefilled()  # nobody can tell when
        self._trace.stamp(job.id, "dispatched", path=route.path.name)
        await self._answer(job, lease, encoded(body), client, call)

    async def _run_both(
        self,
        job: Job,
        bodies: _Bodies,
        route: Route,
        prefill: Lease,
        client: Client,
        decoding: StageCall,
        prefilling: StageCall,
        before_decode: Callable[[], Awaitable[None]] | None,
    ) -> None:
        transfer_id, sender, opening = secrets.token_hex(16), prefill.instance, asyncio.Lock()
        answer: asyncio.Task[None]
        if bodies.shows:
            to_prefill = encoded(first_token_body(bodies.base, transfer_id, sender))
        else:
            to_prefill = encoded(prefill_body(bodies.base, transfer_id, sender, job.request.endpoint, bodies.after))
        to_decode = encoded(
            decode_body(bodies.to_decode, transfer_id, sender, first_token=bodies.shows, after=bodies.after)
        )
        self._trace.stamp(job.id, "dispatched", path=route.path.name, transfer=transfer_id)
        if bodies.shows:
            sends = partial(self._show, job, sender, to_prefill, client, prefilling, opening, lambda: answer.cancel())
        else:
            sends = partial(self._deliver, job, sender, to_prefill)

        def needed() -> bool:
            """D cannot answer without it, or does not."""
            return not (decoding.judged or client.sink.finished) or answer.cancelling() > 0

        async def answers() -> None:
            if before_decode is not None:
                await before_decode()
                self._trace.stamp(job.id, "decode_sent")
            await self._answer(job, route.decode, to_decode, client, decoding, prefilling, opening)

        async with asyncio.TaskGroup() as group:
            prefilled = group.create_task(self._prefill(job, prefill, sends, prefilling, needed))
            answer = group.create_task(answers())
            await asyncio.wait([answer])
            if not (prefilled.done() or answer.cancelled()):  # its answer is of no interest any more, its tidy end is
                await asyncio.wait([prefilled], timeout=PREFILL_LINGER_S)
                prefilled.cancel()

    async def _deliver(self, job: Job, instance: Instance, body: bytes | Pieces, span: str) -> None:
        """Have P send its KV. Raises KvNotDelivered where its answer says that it could not."""
        answer = await self._stages.post(instance, job.request.endpoint, body, job.headers(span), timeout_s=None)
        job.record.cached_tokens = _cached_tokens(answer)
        params = answer.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("ok") is False:
            raise KvNotDelivered(str(params.get("reason") or "no reason given"), stage=instance.id)

    async def _show(
        self,
        job: Job,
        instance: Instance,
        body: bytes | Pieces,
        client: Client,
        call: StageCall,
        opening: asyncio.Lock,
        leave_decode: Callable[[], object],
        span: str,
    ) -> None:
        """Have P send its KV, and show its first token. Where that is all, D is left."""

        def first() -> None:
            call.succeeded()
            self._first_byte(job, instance)

        def whole() -> None:
            leave_decode()
            job.watched.answered()

        stream = self._stages.events(instance, job.request.endpoint, body, job.headers(span))
        async with aclosing(stream) as events:
            await show(
                events,
                client,
                job.request.body,
                stage=instance.id,
                opening=opening,
                on_first=first,
                on_whole=whole,
            )

    async def _prefill(
        self,
        job: Job,
        lease: Lease,
        sends: Callable[[str], Awaitable[None]],
        call: StageCall,
        needed: Callable[[], bool],
    ) -> None:
        """Run P. Its failure fails the attempt while P is `needed`: no longer when the client has D's first byte."""
        instance = lease.instance
        begun, outcome, span = time.monotonic(), "cancelled", job.record.call_span()
        try:
            with call:
                await sends(span)
            outcome = "ok"
            job.passed.prefilled()
        except DeadlineError as error:
            outcome = error.code or type(error).__name__
            raise StageTimeout(error.message, stage=instance.id) from error
        except EpdError as error:
            outcome = error.code or type(error).__name__
            if isinstance(error, KvNotDelivered):
                self._metrics.kv_failed(error.reason)
            if needed():
                raise
            logger.warning("request %s: after the first token, %s", job.id, error.message)
        finally:
            lease.release()
            self._trace.stamp(job.id, "prefilled", outcome=outcome)
            job.record.took("prefilled", begun, span=span, stage=instance.id, outcome=outcome)
            self._metrics.stage_seconds.labels(instance.role.value, outcome).observe(time.monotonic() - begun)

    async def _answer(
        self,
        job: Job,
        lease: Lease,
        body: bytes | Pieces,
        client: Client,
        call: StageCall,
        prefilling: StageCall | None = None,
        opening: asyncio.Lock | None = None,
    ) -> None:
        instance, request, sink = lease.instance, job.request, client.sink
        begun, outcome, span = time.monotonic(), "cancelled", job.record.call_span()

        def news() -> None:
            client.history.answers += 1
            job.watched.answered()
            if prefilling is not None and client.history.answers == 1:
                self._metrics.first_token_streams.labels("kept" if sink.committed else "decode").inc()
            if not sink.committed:
                self._first_byte(job, instance)
            elif client.history.lost_at is not None:
                self._went_on(job, client.history, instance)

        try:
            with call:
                try:
                    if request.stream:
                        stream = self._stages.events(instance, request.endpoint, body, job.headers(span))
                        async with aclosing(stream) as events:
                            await relay(
                                events,
                                client,
                                stage=instance.id,
                                on_first=call.succeeded,
                                on_news=news,
                                opening=opening,
                            )
                    else:
                        answer = await self._stages.fields(
                            instance, request.endpoint, body, job.headers(span), timeout_s=None
                        )
                        call.succeeded()
                        job.watched.answered()
                        job.record.took("answered", begun, span=span, stage=instance.id, outcome="ok")
                        keep = bool(request.body.get("return_token_ids"))
                        await sink.respond_json(200, public_answer(answer, keep_token_ids=keep))
                except DeadlineError as error:
                    # Before P has answered, it is P for whom D waits.
                    late = prefilling if prefilling is not None and not prefilling.judged else call
                    late.failed()
                    raise StageTimeout(error.message, stage=late.incarnation_id[0]) from error
            outcome = "ok"
        except EpdError as error:
            outcome = error.code or type(error).__name__
            if isinstance(error, AnotherAnswerError) and not client.history.answers:
                self._metrics.first_token_streams.labels("other").inc()
            raise
        finally:
            lease.release()
            if request.stream or outcome != "ok":
                job.record.took("answered", begun, span=span, stage=instance.id, outcome=outcome)
            self._metrics.stage_seconds.labels(instance.role.value, outcome).observe(time.monotonic() - begun)

    def _went_on(self, job: Job, history: TokenHistory, instance: Instance) -> None:
        """The client's stream goes on, from this instance."""
        assert history.lost_at is not None, "a stage was lost before another one goes on"
        gap_s, history.lost_at = time.monotonic() - history.lost_at, None
        way = way_on(job.request, history, self._go_on).value
        self._metrics.migrated(way, gap_s)
        job.record.went_on(instance.id, way=way, tokens=len(history.tokens), gap_s=gap_s)

    def _first_byte(self, job: Job, instance: Instance) -> None:
        job.passed.prefilled()
        self._metrics.first_tokens.labels(instance.role.value).inc()
        self._trace.stamp(job.id, "first_byte", stage=instance.id)
        job.record.first_byte(instance.id)


class _Bodies(NamedTuple):
    """What P's and D's bodies are made from. `shows`: the client is shown P's first token."""

    base: Mapping[str, Any]
    to_decode: Mapping[str, Any]
    after: After | None
    shows: bool


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """Prompt tokens that a stage found in its prefix cache, where it says so (`--enable-prompt-tokens-details`)."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None
