"""One attempt at prefill and decode: D and P at once under one transfer id.

D is dispatched first, because P's packets need D's blocks (design §4.5). Closing a stage's connection cancels it, so
cancellation of the task that runs here cancels every stage, and an attempt that fails has left both when it raises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from epd_serve.errors import EpdError
from epd_serve.trace import Trace
from proxy.bodies import decode_body, prefill_body, public_answer
from proxy.errors import KvNotDelivered, most_telling
from proxy.job import Job, encoded
from proxy.metrics import Metrics
from proxy.relay import relay
from proxy.routing import Route
from proxy.sink import ClientSink
from proxy.stage_client import StageClient

logger = logging.getLogger(__name__)
PREFILL_LINGER_S = 5.0


class Attempt:
    """Runs attempts; holds nothing of any of them."""

    def __init__(self, stages: StageClient, metrics: Metrics, trace: Trace) -> None:
        self._stages = stages
        self._metrics = metrics
        self._trace = trace

    async def run(self, job: Job, base: Mapping[str, Any], route: Route, sink: ClientSink) -> None:
        """Answer `job` from the body `base` on the instances of `route`.

        Raises:
            StageError: a stage failed, before or after the first byte (`sink.committed`). StageRefusal. DeadlineError.
        """
        self._metrics.paths.labels(route.path.name).inc()
        prefill_id = route.prefill.instance.id if route.prefill is not None else None
        job.explanation.attempted(route.path.name, prefill_id, route.decode.instance.id)
        if route.prefill is None:
            body = encoded(base)
            self._trace.stamp(job.id, "dispatched", path=route.path.name)
            await self._decode(job, route, body, sink)
            return
        transfer_id = uuid4().hex
        sender = route.prefill.instance
        to_decode = encoded(decode_body(base, transfer_id, sender))
        to_prefill = encoded(prefill_body(base, transfer_id, sender))
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
                reason = str(params.get("reason") or "no reason given")
                self._metrics.kv_failed(reason)
                raise KvNotDelivered(f"stage {instance.id} could not deliver its KV: {reason}", stage=instance.id)
            outcome = "ok"
            job.explanation.stamp("prefilled")
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
                job.explanation.stamp("answered")
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
        job.explanation.stamp("first_byte")
