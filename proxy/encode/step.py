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
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from epd_serve.errors import DeadlineError
from epd_serve.instances import Instance
from proxy.context import Features, RequestContext
from proxy.encode.encoders import EncodeOrder, Encoders
from proxy.encode.single_flight import Seat, SingleFlight
from proxy.errors import StageRefusal, most_telling
from proxy.media.loader import LoadedItem
from proxy.metrics import Metrics
from proxy.registry.feature_directory import FeatureDirectory
from proxy.stages.client import deadline

logger = logging.getLogger(__name__)
LINGER_S = 5.0


class EncodeStep:
    """Runs E for requests, and remembers what is being encoded for whom.

    Args:
        follow_s: how long a request waits for what another one is having encoded.
    """

    def __init__(self, encoders: Encoders, directory: FeatureDirectory, metrics: Metrics, *, follow_s: float) -> None:
        self._encoders = encoders
        self._directory = directory
        self._metrics = metrics
        self._follow_s = follow_s
        self.flights: SingleFlight[bool] = SingleFlight()

    @asynccontextmanager
    async def begin(self, ctx: RequestContext) -> AsyncIterator[None]:
        """Encode while something else goes on. Leaving the context ends it; after an answer, when the encoders have
        given theirs."""
        ctx.encoding = task = asyncio.create_task(self._timed(ctx), name=f"encoding of {ctx.id}")
        try:
            await asyncio.sleep(0)  # with nothing to encode it has ended after that
            yield
            await asyncio.wait([task], timeout=LINGER_S)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # whoever wanted it has got it by awaiting the task
            ctx.encoding = None

    async def _timed(self, ctx: RequestContext) -> None:
        begun = time.monotonic()
        try:
            await self.run(ctx)
        finally:
            ctx.passed.encoded()
        ctx.record.took("encoded", begun)

    async def run(self, ctx: RequestContext) -> None:
        """Set `ctx.features`: every distinct item known, encoded, or missing.

        Raises:
            StageRefusal: an encoder refuses an item.
        """
        items = _distinct(ctx)
        to_encode = [item for item in items if not self._knows(item.key)]
        self._metrics.encode_skipped.inc(len(items) - len(to_encode))
        ctx.record.note("features", items=len(items), in_store=len(items) - len(to_encode))
        missing = await self._obtain(to_encode, EncodeOrder(ctx, self._done, self._knows))
        if to_encode and not missing:
            ctx.watched.encoded()
        ctx.features = self._features(ctx, missing)

    async def again(self, ctx: RequestContext, lost: Collection[str]) -> None:
        """The same after the items named by `lost` (all, where it names none of them) were encoded once more.

        Elsewhere than before where there is an elsewhere. `lost` may hold names that only stages know: vLLM renames an
        item when the request has processor options.
        """
        items = _distinct(ctx)
        items = [item for item in items if item.key in lost] or items
        keys = {item.key for item in items}
        self._metrics.encoded_again.inc(len(items))
        ctx.record.note("encodes_again", items=len(items))
        # What the directory knows of these is what has just proved wrong.
        order = EncodeOrder(ctx, self._done, again=frozenset(keys | set(lost)), shunned=self._directory.makers(keys))
        ctx.features = self._features(ctx, await self._obtain(items, order))

    # What is known of items before they are encoded is enough to call P and D: they render, tokenise and queue while
    # the tower runs. Such an attempt *goes ahead*. Nobody comes to wait in a circle for it (`docs/waiting.md`): it has
    # a place with the stages at once or not at all, so it queues for none, and who has to wait for a place at the
    # encoders, or apart from others, gives that one back first, which cuts the attempt. At the stages it waits for
    # encoders alone.

    async def metadata_known(self, ctx: RequestContext) -> bool:
        """Whether encoders came to be at work on all items that are not there already before the encoding ended. Then
        `ctx.features` are what they will be if all goes well."""

        def under_way() -> bool:
            now, directory = time.monotonic(), self._directory
            return all(directory.metadata(item.key) and directory.is_coming(item.key, now) for item in ctx.items)

        if not await self._comes_true(ctx, under_way):
            return False
        ctx.features = self._features(ctx, ())
        return True

    async def first_stored(self, ctx: RequestContext) -> None:
        """Until the first item is there, which is announced before an encoder's answer comes, or the encoding has
        ended."""
        await self._comes_true(ctx, lambda: self._knows(ctx.items[0].key))

    async def _comes_true(self, ctx: RequestContext, looked_for: Callable[[], bool]) -> bool:
        """Whether announcements make this true before the encoding ends."""
        task, news = ctx.encoding, asyncio.Event()
        assert task is not None, "an encoding is under way"
        ended: Callable[[object], None] = lambda _: news.set()  # noqa: E731 - to be removed again
        task.add_done_callback(ended)
        try:
            with self._directory.followed([item.key for item in ctx.items], news.set):
                while not task.done():
                    if looked_for():
                        return True
                    news.clear()
                    await news.wait()
        finally:
            task.remove_done_callback(ended)
        return False

    @contextmanager
    def attempted(self, ctx: RequestContext, cut: Callable[[], None]) -> Iterator[None]:
        """The time of an attempt that went ahead. `cut` is called where it has to end: items were given up or refused,
        or its place was given back."""
        task = ctx.encoding
        assert task is not None, "an encoding is under way"

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None or ctx.features is None or ctx.features.missing:
                cut()

        task.add_done_callback(ended)
        ctx.passed.cut = cut
        try:
            yield
        finally:
            ctx.passed.cut = None
            task.remove_done_callback(ended)

    async def _obtain(self, items: Sequence[LoadedItem], order: EncodeOrder) -> list[str]:
        """Lead or follow the flight of each item. Returns the keys that came to nothing.

        Nobody waits here with a place that those it waits for may need: one with the stages is given back first.
        """
        if items:
            order.ctx.passed.give_back()
        with ExitStack() as seated:
            seats = {item.key: seated.enter_context(self._join(item.key, again=bool(order.again))) for item in items}
            leading = [item for item in items if seats[item.key].leads]
            following = [item for item in items if not seats[item.key].leads]
            self._metrics.encode_coalesced.inc(len(following))
            if following:
                order.ctx.record.note("encoded_for_another", items=len(following))
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
            order.ctx.passed.give_back()

        try:
            await self._encoders.encode(replace(order, done=done, waits=waits), items)
        except StageRefusal:
            fail()
            raise
        fail()
        if not all(seat.settled for seat in seats.values()):
            order.ctx.passed.leave_encoders()  # who leads the rest may be waiting for this very place

    async def _follow(self, item: LoadedItem, seats: dict[str, Seat[bool]], order: EncodeOrder) -> None:
        try:
            async with deadline(self._follow_s, f"the encoding of {item.ref.param} for another request"):
                leads = await seats[item.key].turn(order.ctx.passed.stand_back)
        except DeadlineError as error:
            seats[item.key].leave()  # or it may come to lead a flight that nobody here flies
            logger.warning("request %s: %s", order.ctx.id, error.message)
            self._metrics.encode_fallback.labels("leader_late").inc()
            order.ctx.record.note("not_encoded", items=1, reason="leader_late")
            return
        if leads:
            await self._lead([item], seats, order)
        elif not seats[item.key].result:
            self._metrics.encode_fallback.labels("leader_failed").inc()
            order.ctx.record.note("not_encoded", items=1, reason="leader_failed")

    def _knows(self, key: str) -> bool:
        return self._directory.knows(key, time.monotonic())

    def _done(self, item: LoadedItem, instance: Instance, entry: dict[str, Any]) -> None:
        if entry:  # an encoder that reports nothing may have been told by an old vLLM: its announcement will say
            self._directory.promised(item.key, entry.get("metadata"), maker=instance.incarnation, now=time.monotonic())

    def _features(self, ctx: RequestContext, missing: Sequence[str]) -> Features:
        by_key = {item.key: self._directory.metadata(item.key) for item in ctx.items}
        metadata = {key: fields for key, fields in by_key.items() if fields is not None}
        return Features(tuple(missing), metadata, self._directory.has_had_metadata)


def _distinct(ctx: RequestContext) -> list[LoadedItem]:
    return list({item.key: item for item in ctx.items}.values())
