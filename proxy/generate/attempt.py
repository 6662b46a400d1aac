"""One attempt at prefill and decode: D and P at once under one transfer id.

D is dispatched first, because P's packets go straight into blocks that D has to allot first. Closing a stage's
connection cancels it, so cancellation of the task that runs here cancels every stage, and an attempt that fails has
left both when it raises.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from epd_serve.errors import DeadlineError, EpdError, StageError
from epd_serve.trace import Trace
from proxy.background import Background
from proxy.config.limits import Timeouts
from proxy.errors import KvNotDelivered, StageTimeout, most_telling
from proxy.generate.relay import relay
from proxy.generate.router import Route
from proxy.generate.stall_watchdog import StallWatchdog
from proxy.metrics import Metrics
from proxy.registry.table import InstanceTable
from proxy.request.cancel_scope import CancelScope
from proxy.request.client_sink import ClientSink
from proxy.request.payload import Pieces, encoded
from proxy.stages.bodies import decode_body, prefill_body, public_answer
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
    ) -> None:
        self._watchdog = StallWatchdog(table, timeouts.stage_silence_s, background)
        self._stages = stages
        self._circuits = circuits
        self._metrics = metrics
        self._trace = trace

    async def run(self, job: Job, base: Mapping[str, Any], route: Route, sink: ClientSink) -> None:
        """Answer `job` from the body `base` on the instances of `route`.

        Raises:
            StageError: a stage failed or hung, before or after the first byte (`sink.committed`). StageRefusal.
        """
        self._metrics.paths.labels(route.path.name).inc()
        prefill_id = route.prefill.instance.id if route.prefill is not None else None
        job.explanation.attempted(route.path.name, prefill_id, route.decode.instance.id)
        decoding = self._circuits.call(route.decode.instance)
        prefilling = self._circuits.call(route.prefill.instance) if route.prefill is not None else None
        calls = (decoding,) if prefilling is None else (prefilling, decoding)
        cancel_scope: CancelScope[StageError] = CancelScope()
        self._watchdog.watch(cancel_scope, sink, calls)
        try:
            with cancel_scope:
                await self._run(job, base, route, sink, decoding, prefilling)
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
        decoding: StageCall,
        prefilling: StageCall | None,
    ) -> None:
        if route.prefill is None or prefilling is None:
            if not job.request.stream:
                job.passed.prefilled()  # nobody can tell when
            self._trace.stamp(job.id, "dispatched", path=route.path.name)
            await self._decode(job, route, encoded(base), sink, decoding, None)
            return
        transfer_id, sender = secrets.token_hex(16), route.prefill.instance
        to_prefill = encoded(prefill_body(base, transfer_id, sender, job.request.endpoint))
        to_decode = encoded(decode_body(base, transfer_id, sender))
        self._trace.stamp(job.id, "dispatched", path=route.path.name, transfer=transfer_id)
        async with asyncio.TaskGroup() as group:
            prefill = group.create_task(self._prefill(job, route, to_prefill, sink, prefilling))
            await self._decode(job, route, to_decode, sink, decoding, prefilling)  # dispatches before a task begins
            if not prefill.done():  # its answer is of no interest any more, its tidy end is
                await asyncio.wait([prefill], timeout=PREFILL_LINGER_S)
                prefill.cancel()

    async def _prefill(self, job: Job, route: Route, body: bytes | Pieces, sink: ClientSink, call: StageCall) -> None:
        """Run P. Its failure fails the attempt, unless the client has its first byte: D no longer needs P then."""
        assert route.prefill is not None, "only paths with a prefilling instance come here"
        instance = route.prefill.instance
        begun, outcome = time.perf_counter(), "cancelled"
        try:
            with call:
                answer = await self._stages.post(instance, job.request.endpoint, body, job.headers, timeout_s=None)
                params = answer.get("kv_transfer_params")
                if isinstance(params, dict) and params.get("ok") is False:
                    reason = str(params.get("reason") or "no reason given")
                    self._metrics.kv_failed(reason)
                    raise KvNotDelivered(f"stage {instance.id} could not deliver its KV: {reason}", stage=instance.id)
            outcome = "ok"
            job.passed.prefilled()
            job.explanation.stamp("prefilled")
        except DeadlineError as error:
            outcome = error.code or type(error).__name__
            raise StageTimeout(error.message, stage=instance.id) from error
        except EpdError as error:
            outcome = error.code or type(error).__name__
            if not sink.committed:
                raise
            logger.warning("request %s: after the first token, %s", job.id, error.message)
        finally:
            route.prefill.release()
            self._trace.stamp(job.id, "prefilled", outcome=outcome)
            self._metrics.stage_seconds.labels(instance.role.value, outcome).observe(time.perf_counter() - begun)

    async def _decode(
        self,
        job: Job,
        route: Route,
        body: bytes | Pieces,
        sink: ClientSink,
        call: StageCall,
        prefilling: StageCall | None,
    ) -> None:
        instance, request = route.decode.instance, job.request
        begun, outcome = time.perf_counter(), "cancelled"

        def first() -> None:
            call.succeeded()
            self._first_byte(job)

        try:
            with call:
                try:
                    if request.stream:
                        stream = self._stages.events(instance, request.endpoint, body, job.headers)
                        async with aclosing(stream) as events:
                            await relay(events, sink, stage=instance.id, on_first=first)
                    else:
                        answer = await self._stages.fields(
                            instance, request.endpoint, body, job.headers, timeout_s=None
                        )
                        call.succeeded()
                        job.trial.survived()
                        job.explanation.stamp("answered")
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
            raise
        finally:
            route.decode.release()
            self._metrics.stage_seconds.labels(instance.role.value, outcome).observe(time.perf_counter() - begun)

    def _first_byte(self, job: Job) -> None:
        job.passed.prefilled()
        job.trial.survived()
        self._metrics.ttft_seconds.observe(asyncio.get_running_loop().time() - job.arrived)
        self._trace.stamp(job.id, "first_byte")
        job.explanation.stamp("first_byte")
