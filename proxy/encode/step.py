"""The encode step: every item encoded at most once, however many requests hold it, and on without those that fail.

An item that the MM Store has already is not encoded (`proxy/registry/feature_directory.py`), one that another request
is having encoded is waited for (`proxy/encode/single_flight.py`), the rest go to their owners
(`proxy/encode/encoders.py`). A missing feature is normal (the prefilling stage recomputes it from the media) and
counted; a 4xx is the client's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from msgspec import structs

from epd_serve.errors import DeadlineError
from epd_serve.instances import Instance
from epd_serve.trace import Trace
from proxy.encode.encoders import EncodeOrder, Encoders
from proxy.encode.encoding import Encoding
from proxy.encode.single_flight import Seat, SingleFlight
from proxy.errors import StageRefusal, most_telling
from proxy.media.loader import LoadedItem
from proxy.metrics import Metrics
from proxy.registry.feature_directory import FeatureDirectory
from proxy.stages.client import deadline
from proxy.stages.job import Features, Job

logger = logging.getLogger(__name__)
LINGER_S = 5.0
END_BYTES = 512


class EncodeStep:
    """Runs E for jobs, and remembers what is being encoded for whom.

    Args:
        follow_s: how long a request waits for what another one is having encoded.
    """

    def __init__(
        self, encoders: Encoders, directory: FeatureDirectory, metrics: Metrics, trace: Trace, *, follow_s: float
    ) -> None:
        self._encoders = encoders
        self._directory = directory
        self._metrics = metrics
        self._trace = trace
        self._follow_s = follow_s
        self.flights: SingleFlight[bool] = SingleFlight()

    @asynccontextmanager
    async def begin(self, job: Job) -> AsyncIterator[Encoding]:
        """Encode while something else goes on. Leaving the context ends it; after an answer, when the encoders have
        given theirs."""
        task = asyncio.create_task(self._stamped(job), name=f"encoding of {job.id}")
        try:
            await asyncio.sleep(0)  # with nothing to encode it has ended after that
            yield Encoding(job, task, self._directory, lambda: self._with_features(job, ()))
            await asyncio.wait([task], timeout=LINGER_S)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # whoever wanted it has got it from `finished`

    async def _stamped(self, job: Job) -> Job:
        begun = time.monotonic()
        try:
            job = await self.run(job)
        finally:
            job.passed.encoded()
        job.record.took("encoded", begun)
        self._trace.stamp(job.id, "encoded", t0=begun)
        return job

    async def run(self, job: Job) -> Job:
        """`job` with its features: every distinct item known, encoded, or missing.

        Raises:
            StageRefusal: an encoder refuses an item.
        """
        items = _distinct(job)
        to_encode = [item for item in items if not self._knows(item.key)]
        for item in to_encode:
            self._metrics.encoded_once.ordered(item.key, _content(job, item))
        self._metrics.encode_skipped.inc(len(items) - len(to_encode))
        job.record.note("features", items=len(items), in_store=len(items) - len(to_encode))
        missing = await self._obtain(to_encode, EncodeOrder(job, self._done, self._knows))
        if to_encode and not missing:
            job.watched.encoded()
        return self._with_features(job, missing)

    async def again(self, job: Job, lost: Collection[str]) -> Job:
        """`job` after the items named by `lost` (all, where it names none of them) were encoded once more.

        Elsewhere than before where there is an elsewhere. `lost` may hold names that only stages know: vLLM renames an
        item when the request has processor options.
        """
        items = _distinct(job)
        items = [item for item in items if item.key in lost] or items
        keys = {item.key for item in items}
        self._metrics.encoded_again.inc(len(items))
        self._metrics.encoded_once.lost(keys)
        job.record.note("encodes_again", items=len(items))
        # What the directory knows of these is what has just proved wrong.
        order = EncodeOrder(job, self._done, again=frozenset(keys | set(lost)), shunned=self._directory.makers(keys))
        return self._with_features(job, await self._obtain(items, order))

    async def _obtain(self, items: Sequence[LoadedItem], order: EncodeOrder) -> list[str]:
        """Lead or follow the flight of each item. Returns the keys that came to nothing.

        Nobody waits here with a place that those it waits for may need: one with the stages is given back first.
        """
        if items:
            order.job.passed.give_back()
        with ExitStack() as seated:
            seats = {item.key: seated.enter_context(self._join(item.key, again=bool(order.again))) for item in items}
            leading = [item for item in items if seats[item.key].leads]
            following = [item for item in items if not seats[item.key].leads]
            self._metrics.encode_coalesced.inc(len(following))
            if following:
                order.job.record.note("encoded_for_another", items=len(following))
            try:
                async with asyncio.TaskGroup() as group:
                    if leading:
                        group.create_task(self._lead(leading, seats, order))
                    for item in following:
                        group.create_task(self._follow(item, seats, order))
            except BaseExceptionGroup as failed:
                raise most_telling(failed) from None
            return [key for key, seat in seats.items() if not seat.result]

    def _join(self, key: str, *, again: bool) -> Seat[bool]:
        """Encoding again has a flight of its own, as one under way may rest on the word that proved wrong. Whoever
        wants the same item meanwhile boards that one."""
        once_more = f"{key} again"
        return self.flights.join(once_more if again or once_more in self.flights else key)

    async def _lead(self, items: Sequence[LoadedItem], seats: dict[str, Seat[bool]], order: EncodeOrder) -> None:
        def done(item: LoadedItem, instance: Instance, entry: dict[str, Any]) -> None:
            order.done(item, instance, entry)
            seats[item.key].land(True)

        def fail() -> None:
            for item in items:
                if seats[item.key].leads:
                    seats[item.key].fail()

        def waits(waiting: Sequence[LoadedItem]) -> None:
            for item in waiting:
                seats[item.key].leave()
            order.job.passed.give_back()

        try:
            await self._encoders.encode(replace(order, done=done, waits=waits), items)
        except StageRefusal:
            fail()
            raise
        fail()
        if not all(seat.settled for seat in seats.values()):
            order.job.passed.leaves_encoders()  # who leads the rest may be waiting for this very place

    async def _follow(self, item: LoadedItem, seats: dict[str, Seat[bool]], order: EncodeOrder) -> None:
        try:
            async with deadline(self._follow_s, f"the encoding of {item.ref.param} for another request"):
                leads = await seats[item.key].turn(order.job.passed.stands_back)
        except DeadlineError as error:
            seats[item.key].leave()  # or it may come to lead a flight that nobody here flies
            logger.warning("request %s: %s", order.job.id, error.message)
            self._metrics.encode_fallback.labels("leader_late").inc()
            order.job.record.note("not_encoded", items=1, reason="leader_late")
            return
        if leads:
            await self._lead([item], seats, order)
        elif not seats[item.key].result:
            self._metrics.encode_fallback.labels("leader_failed").inc()
            order.job.record.note("not_encoded", items=1, reason="leader_failed")

    def _knows(self, key: str) -> bool:
        return self._directory.knows(key, time.monotonic())

    def _done(self, item: LoadedItem, instance: Instance, entry: dict[str, Any]) -> None:
        if entry:  # an encoder that reports nothing may have been told by an old vLLM: its announcement will say
            self._directory.promised(item.key, entry.get("metadata"), maker=instance.incarnation, now=time.monotonic())

    def _with_features(self, job: Job, missing: Sequence[str]) -> Job:
        by_key = {item.key: self._directory.metadata(item.key) for item in job.items}
        metadata = {key: fields for key, fields in by_key.items() if fields is not None}
        return structs.replace(job, features=Features(tuple(missing), metadata, self._directory.has_had_metadata))


def _content(job: Job, item: LoadedItem) -> int:
    """Tells media apart without regard to their key: by who sent them, how they are processed, and their end."""
    options = str(job.request.processor_options)
    return hash((job.record.tenant, options, item.ref.modality, item.size_bytes, bytes(item.source.data[-END_BYTES:])))


def _distinct(job: Job) -> list[LoadedItem]:
    return list({item.key: item for item in job.items}.values())
