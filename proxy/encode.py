"""The encode step: a request's items to the encoders, longest first, and on without them when they fail.

A missing feature is normal (the prefilling stage recomputes it from the pixels) and counted; a 4xx is the client's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from epd_serve.errors import DeadlineError, EpdError, StageError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.trace import Trace
from proxy.bodies import encode_body
from proxy.errors import most_telling
from proxy.job import Job, encoded
from proxy.media import LoadedItem
from proxy.metrics import Metrics
from proxy.policy import Candidate, least_loaded, split_longest_first
from proxy.request import Endpoint
from proxy.settings import Timeouts
from proxy.stage_client import StageClient
from proxy.table import InstanceTable, Work

logger = logging.getLogger(__name__)


class EncodeStep:
    """Runs E for a job. `run` returns the keys that are left to P."""

    def __init__(
        self,
        table: InstanceTable,
        stages: StageClient,
        metrics: Metrics,
        timeouts: Timeouts,
        *,
        retries: int,
        trace: Trace,
    ) -> None:
        self._table = table
        self._stages = stages
        self._metrics = metrics
        self._timeouts = timeouts
        self._retries = retries
        self._trace = trace

    async def run(self, job: Job) -> list[str]:
        """Encode the job's items, each key once.

        Returns:
            Keys of the items that no encoder produced.

        Raises:
            StageRefusal: an encoder refuses an item.
        """
        items = list({item.key: item for item in job.items}.values())
        encoders = self._table.live(Role.E)
        if not encoders:
            return self._fall_back(job, items, "no_encoder")
        shares = split_longest_first([item.weight for item in items], [encoder.load for encoder in encoders])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._encode(job, encoder, [items[index] for index in share]))
                    for encoder, share in zip(encoders, shares, strict=True)
                    if share
                ]
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None
        return [key for task in tasks for key in task.result()]

    async def _encode(self, job: Job, first: Candidate, items: Sequence[LoadedItem]) -> list[str]:
        body = encoded(encode_body(job.base, items))
        weight = sum(item.weight for item in items)
        tried = set()
        encoder: Candidate | None = first
        for _ in range(self._retries + 1):
            if encoder is None:
                break
            tried.add(encoder.life)
            with self._table.acquire(encoder.id, Work.ENCODE, weight) as instance:
                try:
                    await self._post(job, instance, body)
                    return []
                except (StageError, DeadlineError) as error:
                    logger.warning("request %s: %s", job.id, error.message)
                    failed = instance.id
            others = [other for other in self._table.live(Role.E) if other.life not in tried]
            encoder = least_loaded(others)
            if encoder is not None:
                self._metrics.retries.labels(failed).inc()
        return self._fall_back(job, items, "encoder_failed")

    async def _post(self, job: Job, instance: Instance, body: bytes) -> None:
        begun = time.perf_counter()
        outcome = "cancelled"
        self._trace.stamp(job.id, "encode_sent", to=instance.id)
        try:
            await self._stages.post(instance, Endpoint.CHAT, body, job.headers, timeout_s=self._timeouts.encode_s)
            outcome = "ok"
        except EpdError as error:
            outcome = error.code or type(error).__name__
            raise
        finally:
            self._metrics.stage_seconds.labels("E", outcome).observe(time.perf_counter() - begun)
            self._trace.stamp(job.id, "encode_done", by=instance.id, outcome=outcome)

    def _fall_back(self, job: Job, items: Sequence[LoadedItem], reason: str) -> list[str]:
        logger.warning("request %s: %d items go on unencoded (%s)", job.id, len(items), reason)
        self._metrics.encode_fallback.labels(reason).inc(len(items))
        return [item.key for item in items]
