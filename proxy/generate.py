"""The prefill and decode step: D and P at once under one transfer id, repeated before the first byte, never after.

D is dispatched first, because P's packets need D's blocks (design §4.5). Closing a stage's connection cancels it, so
cancellation of the task that runs here cancels every stage.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from uuid import uuid4

from epd_serve.errors import EpdError, StageError
from epd_serve.trace import Trace
from proxy.bodies import decode_body, prefill_body, public_answer
from proxy.errors import StageUnreachable, most_telling
from proxy.job import Job, encoded
from proxy.metrics import Metrics
from proxy.relay import relay
from proxy.routing import Life, Route, Router
from proxy.settings import Timeouts
from proxy.sink import ClientSink
from proxy.stage_client import StageClient
from proxy.table import InstanceTable

logger = logging.getLogger(__name__)
BACKOFF_S = 0.2
REPROBE_S = 1.0
PREFILL_LINGER_S = 5.0


class GenerateStep:
    """Answers a job through `sink`, or raises what to answer instead."""

    def __init__(
        self,
        table: InstanceTable,
        router: Router,
        stages: StageClient,
        metrics: Metrics,
        timeouts: Timeouts,
        *,
        retries: int,
        trace: Trace,
    ) -> None:
        self._table = table
        self._router = router
        self._stages = stages
        self._metrics = metrics
        self._timeouts = timeouts
        self._retries = retries
        self._trace = trace

    async def run(self, job: Job, sink: ClientSink) -> None:
        """Attempt until one succeeds, the client has its first byte, or the retries are used up.

        An instance that cannot be reached at all does not use up a retry: it has just died and the launcher is
        about to say so. Such probing is bounded by `instance_wait_s`.
        """
        loop = asyncio.get_running_loop()
        multimodal, fused = bool(job.items), job.request.needs_fused is not None
        avoid: set[Life] = set()
        failures = 0
        probing_until: float | None = None
        while True:
            route = await self._router.route(multimodal=multimodal, fused=fused, avoid=avoid)
            lives = {
                lease.instance.id: (lease.instance.id, lease.instance.incarnation)
                for lease in (route.decode, route.prefill)
                if lease is not None
            }
            try:
                await self._attempt(job, route, sink)
                return
            except StageError as error:
                if sink.committed or not error.retryable:
                    raise
                avoid.add(lives[error.stage])
                if isinstance(error, StageUnreachable):
                    probing_until = probing_until or loop.time() + self._timeouts.instance_wait_s
                    give_up = loop.time() >= probing_until
                else:
                    failures += 1
                    give_up = failures > self._retries
                if give_up:
                    raise
                logger.warning("request %s: %s; trying again", job.id, error.message)
                self._metrics.retries.labels(error.stage).inc()
                unreachable = isinstance(error, StageUnreachable)
            finally:
                route.release()
            if not self._router.has_alternative(multimodal=multimodal, fused=fused, avoid=avoid):
                # The same instance again: after the launcher's word about it, or a little later.
                pause_s = REPROBE_S if unreachable else BACKOFF_S * failures
                await self._table.changed(pause_s * random.uniform(0.5, 1.0))

    async def _attempt(self, job: Job, route: Route, sink: ClientSink) -> None:
        self._metrics.paths.labels(route.path.name).inc()
        if route.prefill is None:
            body = encoded(job.base)
            self._trace.stamp(job.id, "dispatched", path=route.path.name)
            await self._decode(job, route, body, sink)
            return
        transfer_id = uuid4().hex
        sender = route.prefill.instance
        to_decode = encoded(decode_body(job.base, transfer_id, sender))
        to_prefill = encoded(prefill_body(job.base, transfer_id, sender))
        self._trace.stamp(job.id, "dispatched", path=route.path.name, transfer=transfer_id)
        try:
            async with asyncio.TaskGroup() as group:
                decode = group.create_task(self._decode(job, route, to_decode, sink))
                prefill = group.create_task(self._prefill(job, route, to_prefill, sink))
                await asyncio.wait([decode])
                if not prefill.done():  # its answer is of no interest any more, its tidy end is
                    await asyncio.wait([prefill], timeout=PREFILL_LINGER_S)
                    prefill.cancel()
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None

    async def _prefill(self, job: Job, route: Route, body: bytes, sink: ClientSink) -> None:
        """Run P. Its failure fails the attempt, unless the client has its first byte: D no longer needs P then."""
        assert route.prefill is not None, "only paths with a prefilling instance come here"
        instance = route.prefill.instance
        begun, outcome = time.perf_counter(), "cancelled"
        try:
            answer = await self._stages.post(instance, job.request.endpoint, body, job.headers, timeout_s=None)
            params = answer.get("kv_transfer_params")
            if isinstance(params, dict) and params.get("ok") is False:
                reason = params.get("reason") or "no reason given"
                raise StageError(f"stage {instance.id} could not deliver its KV: {reason}", stage=instance.id)
            outcome = "ok"
        except EpdError as error:
            outcome = error.code or type(error).__name__
            if not sink.committed:
                raise
            logger.warning("request %s: after the first token, %s", job.id, error.message)
        finally:
            route.prefill.release()
            self._trace.stamp(job.id, "prefill_done", outcome=outcome)
            self._metrics.stage_seconds.labels(instance.role.value, outcome).observe(time.perf_counter() - begun)

    async def _decode(self, job: Job, route: Route, body: bytes, sink: ClientSink) -> None:
        instance, request = route.decode.instance, job.request
        begun, outcome = time.perf_counter(), "cancelled"
        try:
            if request.stream:
                async with aclosing(self._stages.events(instance, request.endpoint, body, job.headers)) as events:
                    await relay(events, sink, stage=instance.id, on_first=lambda: self._first_byte(job))
            else:
                answer = await self._stages.post(instance, request.endpoint, body, job.headers, timeout_s=None)
                keep = bool(request.body.get("return_token_ids"))
                await sink.respond_json(200, public_answer(answer, keep_token_ids=keep))
            outcome = "ok"
        except EpdError as error:
            outcome = error.code or type(error).__name__
            raise
        finally:
            route.decode.release()
            self._metrics.stage_seconds.labels(instance.role.value, outcome).observe(time.perf_counter() - begun)

    def _first_byte(self, job: Job) -> None:
        self._metrics.ttft_seconds.observe(asyncio.get_running_loop().time() - job.arrived)
        self._trace.stamp(job.id, "first_byte")
