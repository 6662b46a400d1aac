"""Calls to encoders: which of them gets which items, one call per item, another one elsewhere when it fails; and the
single flight of an item that several requests want: one has it encoded, the others wait for that.

Owns back-pressure (an encoder whose store has no room is left alone), the retries, when an encoder that hangs is given
up, and who leads and who follows. Which items need encoding at all is `proxy/encode/step.py`'s business.

Each item has a call of its own, so that it is known, forwarded and waited for by itself, and fails by itself. They go
out in the order of the prompt, in which the prefill needs them. Only small ones share a call, since a call costs the
proxy time whatever is in it. Within a call each item is still stored and announced when it is done, so a consumer's
prefetch never waits for the others.

One image of several tiles can keep several idle encoders busy: it is cut into parts (`store/keys.py`), which are items
from there on. One that fails is tried elsewhere as any item is; the image is there when all of its parts are.

A leader of a flight that fails hands over to exactly one follower, and after `tries` failures all give up together; a
leader that leaves (its client did) hands over without a failure. Lives in one event loop, no locks.

    LEADS --land--> everybody has it                  LEADS --fail, leave--> the next in the queue LEADS
    LEADS --fail for the last time--> nobody has it           follows --leave--> gone
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

from epd_serve.errors import DeadlineError, EpdError, StageError
from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from proxy.admission.queue import Stage
from proxy.context import RequestContext, Services
from proxy.errors import StageDied, StageFault, most_telling
from proxy.media.loader import LoadedItem
from proxy.registry.instance_state import Lease, Work
from proxy.request.client import CancelScope
from proxy.request.parse import Endpoint
from proxy.routing.policy import Candidate, calls, place_items, preferred, share_of
from proxy.stages.bodies import encode_body
from proxy.stages.circuits import StageCall
from proxy.strict_json import encoded
from store.keys import part_keys, part_of, parts_by_whole

logger = logging.getLogger(__name__)
RELOOK_S = 0.5  # a full store's last report may lapse without any news
TRIES = 2


@dataclass(frozen=True)
class EncodeOrder:
    """What is the same for all calls about one request's items.

    Attributes:
        seats: by key, in the flights of the items: told of each that is done, and left where items wait apart.
        parts: the same of parts of items that are cut.
        again: keys to be encoded even where they are believed to be there.
        shunned: incarnations of encoders to ask last (they made what got lost).
    """

    ctx: RequestContext
    seats: Mapping[str, Seat]
    again: frozenset[str] = frozenset()
    shunned: frozenset[str] = frozenset()
    parts: dict[str, PartSeat] = field(default_factory=dict)

    def seat(self, key: str) -> Seat | PartSeat:
        """Of an item, or of a part of one."""
        return self.parts[key] if key in self.parts else self.seats[key]


class Encoders:
    """All encoders of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._table, self._metrics = services.table, services.metrics
        self._directory = services.dispatcher.directory
        self._timeouts = services.settings.timeouts

    async def encode(
        self, order: EncodeOrder, items: Sequence[LoadedItem], tried: frozenset[IncarnationId] = frozenset()
    ) -> None:
        """Have distinct items encoded in parallel, each by its owner or where it is done sooner
        (`proxy/routing/policy.py`), once the encoders take the request.

        An item that fails is tried elsewhere, alone. Items that no encoder produced are logged and counted; their seats
        do not land.

        Raises:
            StageRefusal: an encoder refuses an item.
        """
        ctx = order.ctx
        if apart_s := ctx.watched.apart_s:
            for item in items:
                order.seat(item.key).leave()  # nobody else must wait for them meanwhile
            ctx.passed.give_back()
            since = time.monotonic()
            await asyncio.sleep(apart_s)
            ctx.record.took("apart", since)
        if ctx.watched.over:
            return self.give_up(ctx, len(items), "encoder_failed")
        await ctx.passed.to_encoders()
        encoders = await self._available(order, tried)
        if isinstance(encoders, str):
            ctx.passed.leased(Stage.ENCODE)
            return self.give_up(ctx, len(items), encoders)
        items, workers, shares = self._placed(order, items, encoders)
        costs = [item.tokens for item in items]
        if not order.again:
            self._join_makers(items, encoders, shares)
        chosen = [one.id for one, share in zip(workers, shares, strict=True) if share]
        ctx.record.spread(share_of(costs, len(encoders)), workers, chosen)
        with ExitStack() as leases:
            works = []
            for worker, part in calls(costs, shares, alone=bool(tried)):
                # Counted before the first call begins: who chooses next has to see all of them.
                lease = self._table.acquire(encoders[worker].id, Work.ENCODE, sum(costs[index] for index in part))
                leases.callback(lease.release)
                works.append(self._encode_at(lease, order, [items[index] for index in part], tried))
            ctx.passed.leased(Stage.ENCODE)
            await together(works)

    def _placed(
        self, order: EncodeOrder, items: Sequence[LoadedItem], encoders: Sequence[Candidate]
    ) -> tuple[list[LoadedItem], Sequence[Candidate], list[list[int]]]:
        """`place_items`. An image is cut as it is where another proxy is having it encoded; not where a part may have
        been lost, nor where only vLLM knows the items' names."""
        now = time.monotonic()

        def cut(item: LoadedItem, count: int) -> Sequence[LoadedItem]:
            known = len(self._directory.parts(item.key, now))
            own = known or (1 if self._directory.is_coming(item.key, now) else min(item.tiles, count))
            if own == 1:
                return [item]
            part = replace(item, tokens=item.tokens / own, tiles=1)
            return [replace(part, key=key) for key in part_keys(item.key, own)]

        whole = order.again or order.ctx.request.processor_options
        most = 1 if whole else self._services.settings.image_parts
        placed, workers, shares = place_items(items, encoders, cut, self._device_of, most)
        self._seat_parts(order, placed)
        return placed, workers, shares

    def _device_of(self, id: str) -> object:
        return self._table.instance(id).computes_on or id

    def _seat_parts(self, order: EncodeOrder, items: Sequence[LoadedItem]) -> None:
        for whole, keys in parts_by_whole(item.key for item in items if item.key not in order.parts).items():
            siblings: list[PartSeat] = []
            order.parts.update((key, PartSeat(order.seats[whole], siblings)) for key in keys)
            self._metrics.image_parts.inc(len(keys))

    def _join_makers(
        self, items: Sequence[LoadedItem], encoders: Sequence[Candidate], shares: Sequence[list[int]]
    ) -> None:
        """What an encoder is at work on, for another proxy, goes there and is encoded once, however busy that makes it
        look."""
        now, places = time.monotonic(), {one.incarnation: place for place, one in enumerate(encoders)}
        for index, item in enumerate(items):
            place = places.get(self._directory.made_by(item.key, now))
            if place is not None and index not in shares[place]:
                for share in shares:
                    if index in share:
                        share.remove(index)
                shares[place].append(index)
                shares[place].sort()

    async def _available(self, order: EncodeOrder, tried: Collection[IncarnationId]) -> Sequence[Candidate] | str:
        """Encoders to choose from, or why there are none. Waits for room in a store, `encode_s` at most, and in a pause
        for an encoder, which may be on its way; `instance_wait_s` where no other stage encodes."""
        pause, needed = self._table.pause, not self._services.settings.stages_encode
        until = pause.now() + self._timeouts.encode_s
        needed_until = pause.now() + self._timeouts.instance_wait_s
        waits = False
        while True:
            untried = [encoder for encoder in self._table.live(Role.E) if encoder.incarnation_id not in tried]
            heard = [encoder for encoder in untried if not self._hangs(encoder.incarnation_id)]
            roomy = [encoder for encoder in heard if not encoder.full]
            left_s = until - pause.now()
            if roomy:
                return preferred(roomy, [one.incarnation_id for one in roomy if one.incarnation in order.shunned])
            if untried and not heard and not needed:
                return "encoder_silent"
            if not heard:
                left_s = needed_until - pause.now() if needed else pause.left_s
            if left_s <= 0:
                absent = "encoder_silent" if untried else "encoder_failed" if tried else "no_encoder"
                return "store_full" if heard else absent
            order.ctx.passed.leased(Stage.ENCODE)  # nobody else waits for it meanwhile
            if heard:
                self._metrics.store_waits.inc()
                if not waits:
                    order.ctx.record.note("waits", line="store", full=len(heard))
                waits = True
            await self._table.changed(min(left_s, RELOOK_S) if untried else left_s)

    async def _encode_at(
        self, lease: Lease, order: EncodeOrder, items: Sequence[LoadedItem], tried: frozenset[IncarnationId]
    ) -> None:
        """One call, and what has to be done elsewhere of it. Releases `lease`."""
        ctx, instance = order.ctx, lease.instance
        incarnation_id = instance.incarnation_id
        try:
            with ctx.watched.at(incarnation_id, encoding=True) as stay, self._services.circuits.call(instance) as call:
                try:
                    entries = await self._post(order, instance, items, call)
                except StageDied as error:
                    ctx.watched.died(stay, incarnation_id, ago_s=error.ago_s)
                    raise
        except (StageError, DeadlineError) as error:
            logger.warning("request %s: %s", ctx.id, error.message)
            ctx.record.failed("encode_failed", error, instance.id)
            if isinstance(error, StageFault) and self._table.is_alive(*incarnation_id):
                self._services.circuits.acquit(ctx.faults.note(error, incarnation_id))
            entries = None
        finally:
            lease.release()
        for item in items:
            if entries is None:
                there = not order.again and self._directory.knows(item.key, time.monotonic())  # before the encoder died
            else:
                there, entry = True, entries.get(item.key)
                if not entries and item.key in order.parts:
                    entry = {"metadata": None}  # vLLM 0.23 says nothing, and P has to be told of parts
                if isinstance(entry, dict) and entry:  # else its announcement will say
                    metadata, maker = entry.get("metadata"), instance.incarnation
                    self._directory.promised(item.key, metadata, maker=maker, now=time.monotonic())
            if there:
                order.seat(item.key).land()
        if left := [item for item in items if not order.seat(item.key).landed]:
            await self._elsewhere(order, left, instance, tried | {incarnation_id})

    async def _elsewhere(
        self, order: EncodeOrder, items: Sequence[LoadedItem], failed: Instance, tried: frozenset[IncarnationId]
    ) -> None:
        ctx = order.ctx
        if len(tried) > self._services.settings.retries or ctx.watched.over:
            return self.give_up(ctx, len(items), "encoder_failed")
        if any(other.incarnation_id not in tried for other in self._table.live(Role.E)):
            if not self._services.budget.withdraw(time.monotonic()):
                self._metrics.retries_refused.inc()
                ctx.record.note("retry_refused", stage=failed.id)
                return self.give_up(ctx, len(items), "no_retries_left")
            self._metrics.retries.labels(failed.id).inc()
            ctx.record.again("retry", stage=failed.id, of="encode")
        await self.encode(order, items, tried)

    async def _post(
        self, order: EncodeOrder, instance: Instance, items: Sequence[LoadedItem], call: StageCall
    ) -> Mapping[str, object]:
        """What the encoder answers about its items, by key. Raises StageDied when it falls silent meanwhile: its queue
        may be long, and then `encode_s` is right, or its processes may be stopped, and then it is not."""
        ctx, timeouts, watchdog = order.ctx, self._timeouts, self._services.watchdog
        body = encoded(encode_body(ctx.base, items, order.again))
        begun, outcome, span = time.monotonic(), "cancelled", ctx.record.call_span()
        headers, silence = ctx.headers(span), CancelScope[StageError]()
        watchdog.watch(silence, ctx.sink, [call], timeouts.encode_silence_s)
        answer: Mapping[str, object] = {}
        try:
            with silence:
                post = self._services.stages.post
                answer = await post(instance, Endpoint.CHAT, body, headers, timeout_s=timeouts.encode_s)
            if silence.reason is not None:
                raise silence.reason
            outcome = "ok"
            ctx.record.encoded_by(instance.id)
            entries = answer.get("ec_transfer_params")
            return entries if isinstance(entries, dict) else {}
        except EpdError as error:
            outcome = error.code or type(error).__name__
            raise
        finally:
            watchdog.unwatch(silence)
            self._metrics.stage_seconds.labels("E", outcome).observe(time.monotonic() - begun)
            parts = [f"{part.index}-{part.count}" for item in items if (part := part_of(item.key)) is not None]
            which = {"parts": ",".join(parts)} if parts else {}
            ctx.record.took(
                "encode_call", begun, span=span, stage=instance.id, items=len(items), outcome=outcome, **which
            )

    def _hangs(self, incarnation_id: IncarnationId) -> bool:
        return self._table.silence_s(*incarnation_id) > self._timeouts.encode_silence_s

    def give_up(self, ctx: RequestContext, items: int, reason: str) -> None:
        """So many go on unencoded."""
        logger.warning("request %s: %d items go on unencoded (%s)", ctx.id, items, reason)
        self._metrics.encode_fallback.labels(reason).inc(items)
        ctx.record.note("not_encoded", items=items, reason=reason)


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them at once. Raises the most telling error, after the others have been cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failed:
        raise most_telling(failed) from None


class SingleFlight(dict[str, "list[Seat]"]):
    """The flights under way: by key the seats of who wants it, of which the first leads.

    Args:
        tries: how many leaders may fail before all of a flight give up.
    """

    def __init__(self, *, tries: int = TRIES) -> None:
        super().__init__()
        self.tries = tries

    def join(self, key: str) -> Seat:
        """A place in the flight of `key`; the first one leads."""
        return Seat(self, key)


class Seat:
    """One request's place in the flight of one key. Leaving its `with` block gives the place up.

    Attributes:
        landed: what was wanted is there.
    """

    def __init__(self, flights: SingleFlight, key: str) -> None:
        self._flights = flights
        self._key = key
        self._seats = flights.setdefault(key, [])  # of the flight; of none once there is nothing to wait for
        self._seats.append(self)
        self._failures = 0  # of all leaders, as the last one knows
        self._moved = asyncio.Event()
        self.landed = False

    @property
    def leads(self) -> bool:
        return bool(self._seats) and self._seats[0] is self

    @property
    def settled(self) -> bool:
        """There is nothing more to wait for."""
        return not self._seats

    async def turn(self, handed_over: Callable[[], None] = lambda: None) -> bool:
        """Wait until this seat leads (True) or all is settled (False). `handed_over`: called when another one leads."""
        while self._seats and not self.leads:
            self._moved.clear()
            await self._moved.wait()
            if self._seats:
                handed_over()
        return self.leads

    def land(self) -> None:
        """Its request has it: so has everybody, if it leads. One that has left has it for itself."""
        self.landed = True
        if self.leads:
            self._end(landed=True)

    def fail(self) -> None:
        """A leader could not make it: one follower tries, or all give up. No matter for one that does not lead."""
        if self.leads:
            self._failures += 1
            if self._failures < self._flights.tries:
                self.leave()
            else:
                self._end(landed=False)

    def leave(self) -> None:
        """Give the place up; a leader's goes to the next in the queue. Any number of calls."""
        seats, led, self._seats = self._seats, self.leads, []
        if seats:
            seats.remove(self)
            if not seats:
                del self._flights[self._key]
            elif led:
                seats[0]._failures = self._failures
                for seat in seats:
                    seat._moved.set()

    def _end(self, *, landed: bool) -> None:
        del self._flights[self._key]
        for seat in self._seats:
            seat._seats, seat.landed = [], landed
            seat._moved.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class PartSeat:
    """For one part of an image, whose seat lands with the last of its parts.

    Args:
        whole: of the image. siblings: of all its parts; this one is added.
    """

    def __init__(self, whole: Seat, siblings: list[PartSeat]) -> None:
        self._whole, self._siblings, self.landed = whole, siblings, False
        siblings.append(self)

    def land(self) -> None:
        """The part is there."""
        self.landed = True
        if all(one.landed for one in self._siblings):
            self._whole.land()

    def leave(self) -> None:
        """Give the image's place up."""
        self._whole.leave()
