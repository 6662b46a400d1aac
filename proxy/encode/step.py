"""The encode step: every item encoded at most once, however many requests hold it, and on without those that fail.

An item that the MM Store has already is not encoded (`proxy/registry/feature_directory.py`), one that another request
is having encoded is waited for, the rest go to their owners (`proxy/encode/encoders.py`). A missing feature is normal
(the prefilling stage recomputes it from the media) and counted, but where no other stage encodes, which ends the
request; a 4xx is the client's.

What is known of the items before they are encoded is enough to call P and D: they render, tokenise and queue while the
tower runs. Such an attempt *goes ahead*. Nobody comes to wait in a circle for it (`docs/waiting.md`): it takes a place
with the stages at once or not at all, so it queues for none, and who has to wait for a place at the encoders, or apart
from others, gives that one back first, which cuts the attempt. At the stages it waits for encoders alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from epd_serve.errors import DeadlineError
from proxy.context import Features, RequestContext, Services
from proxy.encode.encoders import EncodeOrder, Encoders, Seat, SingleFlight, together
from proxy.errors import NotEncoded, StageRefusal
from proxy.media.loader import LoadedItem
from proxy.stages.client import deadline
from store.arena import Arena
from store.errors import StoreError

logger = logging.getLogger(__name__)
LINGER_S = 5.0
END_BYTES = 512
LOCK_TIMEOUT_S = 0.0002
"""All requests wait while the arena is asked. Whoever changes its index has the lock for microseconds."""

ASK_AGAIN_S, COMPLAIN_AGAIN_S = 0.05, 60.0


class EncodeStep:
    """Runs E for requests, and remembers what is being encoded for whom."""

    def __init__(self, services: Services) -> None:
        self._metrics, self._directory = services.metrics, services.dispatcher.directory
        self._encoders = Encoders(services)
        self._stages_encode = services.settings.stages_encode
        self._follow_s = services.settings.timeouts.encode_s * (services.settings.retries + 1)
        self.flights = SingleFlight()

    @asynccontextmanager
    async def begin(self, ctx: RequestContext) -> AsyncIterator[None]:
        """Encode while something else goes on. Leaving the context ends it; after an answer, when the encoders have
        given theirs."""
        ctx.encoding = task = asyncio.create_task(self.run(ctx), name=f"encoding of {ctx.id}")
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

    async def run(self, ctx: RequestContext) -> None:
        """Set `ctx.features`: every distinct item known, encoded, or missing.

        Raises:
            StageRefusal: an encoder refuses an item. NotEncoded: something is missing that no other stage can make.
        """
        begun = time.monotonic()
        items = _distinct(ctx)
        to_encode = [item for item in items if not self._is_had(item.key, begun)]
        for item in to_encode:
            self._metrics.encoded_once.ordered(item.key, _content(ctx, item))
        self._metrics.encode_skipped.inc(len(items) - len(to_encode))
        ctx.record.note("features", items=len(items), in_store=len(items) - len(to_encode))
        missing = None
        try:
            missing = await self._obtain(ctx, to_encode)
        finally:
            ctx.passed.encoded(well=missing == [])
        if to_encode and not missing:
            ctx.watched.encoded()
        ctx.record.took("encoded", begun)
        ctx.features = self._features(ctx, missing)
        self._check_whole(ctx, ctx.features)

    async def again(self, ctx: RequestContext, lost: Collection[str]) -> None:
        """The same after the items named by `lost` (all, where it names none of them) were encoded once more.

        Elsewhere than before where there is an elsewhere. `lost` may hold names that only stages know: vLLM renames an
        item when the request has processor options. Raises as `run`.
        """
        items = _distinct(ctx)
        items = [item for item in items if item.key in lost] or items
        self._metrics.encoded_again.inc(len(items))
        self._metrics.encoded_once.lost([item.key for item in items])
        ctx.record.note("encodes_again", items=len(items))
        # What the directory knows of these is what has just proved wrong.
        again = frozenset({*lost, *(item.key for item in items)})
        ctx.features = self._features(ctx, await self._obtain(ctx, items, again))
        self._check_whole(ctx, ctx.features)

    async def metadata_known(self, ctx: RequestContext) -> bool:
        """Whether encoders came to be at work on all items that are not there already before the encoding ended. Then
        `ctx.features` are what they will be if all goes well."""

        def under_way(now: float) -> bool:
            known = self._directory
            return all(known.metadata(item.key) and known.is_coming(item.key, now) for item in ctx.items)

        if not await self._comes_true(ctx, under_way):
            return False
        ctx.features = self._features(ctx, ())
        return True

    async def first_stored(self, ctx: RequestContext) -> None:
        """Until the first item is there, which is announced before an encoder's answer comes, or the encoding has
        ended."""
        await self._comes_true(ctx, lambda now: self._directory.knows(ctx.items[0].key, now))

    async def _comes_true(self, ctx: RequestContext, looked_for: Callable[[float], bool]) -> bool:
        """Whether announcements make this true before the encoding ends."""
        task, news = ctx.encoding, asyncio.Event()
        assert task is not None, "an encoding is under way"
        task.add_done_callback(lambda _: news.set())
        with self._directory.followed([item.key for item in ctx.items], news.set):
            while not task.done():
                if looked_for(time.monotonic()):
                    return True
                news.clear()
                await news.wait()
        return False

    async def _obtain(
        self, ctx: RequestContext, items: Sequence[LoadedItem], again: frozenset[str] = frozenset()
    ) -> list[str]:
        """Lead or follow the flight of each item. Returns the keys that came to nothing.

        Nobody waits here with a place that those it waits for may need: one with the stages is given back first.
        """
        if items:
            ctx.passed.give_back()
        with ExitStack() as seated:
            seats = {item.key: seated.enter_context(self._join(item.key, again=bool(again))) for item in items}
            order = EncodeOrder(ctx, seats, again, self._directory.makers(again))
            leading = [item for item in items if seats[item.key].leads]
            following = [item for item in items if not seats[item.key].leads]
            self._metrics.encode_coalesced.inc(len(following))
            if following:
                ctx.record.note("encoded_for_another", items=len(following))
            works = [self._lead(order, leading)] if leading else []
            await together([*works, *(self._follow(order, item) for item in following)])
            return [key for key, seat in seats.items() if not seat.landed]

    def _join(self, key: str, *, again: bool) -> Seat:
        """Encoding again has a flight of its own, as one under way may rest on the word that proved wrong. Whoever
        wants the same item meanwhile boards that one."""
        once_more = f"{key} again"
        return self.flights.join(once_more if again or once_more in self.flights else key)

    async def _lead(self, order: EncodeOrder, items: Sequence[LoadedItem]) -> None:
        refusal: StageRefusal | None = None
        try:
            await self._encoders.encode(order, items)
        except StageRefusal as error:
            refusal = error
        for item in items:
            order.seats[item.key].fail()  # those that have not landed
        if refusal is not None:
            raise refusal
        if not all(seat.settled for seat in order.seats.values()):
            order.ctx.passed.leave_encoders()  # who leads the rest may be waiting for this very place

    async def _follow(self, order: EncodeOrder, item: LoadedItem) -> None:
        ctx, seat = order.ctx, order.seats[item.key]
        try:
            async with deadline(self._follow_s, f"the encoding of {item.ref.param} for another request"):
                leads = await seat.turn(ctx.passed.stand_back)
        except DeadlineError:
            seat.leave()  # or it may come to lead a flight that nobody here flies
            return self._encoders.give_up(ctx, 1, "leader_late")
        if leads:
            await self._lead(order, [item])
        elif not seat.landed:
            self._encoders.give_up(ctx, 1, "leader_failed")

    def _is_had(self, key: str, now: float) -> bool:
        """Whether no encoder need be asked for it: it is there, and its metadata is known to whom nothing else will do.
        An encoder that finds it in the store tells that without encoding."""
        return self._directory.knows(key, now) and (self._stages_encode or self._directory.metadata(key) is not None)

    def _check_whole(self, ctx: RequestContext, features: Features) -> None:
        """Raises NotEncoded where no other stage encodes and something is missing; PoisonousRequest, if by the body."""
        lacking = {item.key for item in ctx.items if item.key in features.missing or item.key not in features.metadata}
        if lacking and not self._stages_encode:
            ctx.watched.check()
            raise NotEncoded(f"no encoder produced {len(lacking)} of the media items, and no other stage has one")

    def _features(self, ctx: RequestContext, missing: Sequence[str]) -> Features:
        by_key = {item.key: self._directory.metadata(item.key) for item in ctx.items}
        metadata = {key: fields for key, fields in by_key.items() if fields is not None}
        now = time.monotonic()
        parts = {key: its for key in by_key if key not in missing and (its := self._directory.parts(key, now))}
        return Features(tuple(missing), metadata, self._directory.has_had_metadata, parts)


class HostArena:
    """The arena of the proxy's own host, asked whether it holds a feature: the truth behind the announcements, as
    `holds` of `FeatureDirectory`. Attached when first asked; never blocks the event loop for long, never raises."""

    def __init__(self, path: str) -> None:
        """Without a path it never knows."""
        self._path = path
        self._arena: Arena | None = None
        self._ask_at = self._complain_at = 0.0

    def holds(self, key: str) -> bool | None:
        """Whether the arena has `key`; None without an arena, or while it does not answer."""
        now = time.monotonic()
        if not self._path or now < self._ask_at:
            return None
        try:
            if self._arena is None:
                self._arena = Arena.attach(Path(self._path), prefault=False, lock_timeout_s=LOCK_TIMEOUT_S)
            return self._arena.contains(key)
        except (StoreError, OSError) as error:
            self._ask_at = now + ASK_AGAIN_S
            if now >= self._complain_at:
                self._complain_at = now + COMPLAIN_AGAIN_S
                logger.warning("the arena cannot be asked, announcements have to do: %s", error)
            return None

    def close(self) -> None:
        if self._arena is not None:
            try:
                self._arena.close()
            except StoreError as error:
                logger.warning("arena %s was not closed: %s", self._path, error)
            self._arena = None


def _content(ctx: RequestContext, item: LoadedItem) -> int:
    """Tells media apart without regard to their key: by who sent them, how they are processed, and their end."""
    options = str(ctx.request.processor_options)
    return hash((ctx.record.tenant, options, item.ref.modality, item.size_bytes, bytes(item.source.data[-END_BYTES:])))


def _distinct(ctx: RequestContext) -> list[LoadedItem]:
    return list({item.key: item for item in ctx.items}.values())
