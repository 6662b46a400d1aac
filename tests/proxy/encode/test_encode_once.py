"""Nothing is encoded twice: known features, requests at once, proxies at once; and who encodes when somebody fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from epd_serve.wire import FeatureFailed, FeatureReady, StoreReport
from proxy.context import RequestContext
from proxy.encode.step import EncodeStep
from proxy.fields.parts import MediaRef
from proxy.media.loader import LoadedItem
from proxy.registry.table import InstanceTable
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.routing.policy import owners
from store.arena import Arena
from tests.proxy.fakes import (
    GRID,
    QUICK,
    Cluster,
    another_proxy,
    breaks,
    cluster,
    context,
    data_url,
    encodes,
    hangs,
    image_file,
    once,
    refuses,
    replies,
    services,
    settings,
)
from tests.waiting import until


def coloured(*colors: str) -> list[str]:
    return [data_url(image_file(color=color)) for color in colors]


def owner_of(c: Cluster, *, place: int = 0) -> str:
    """The encoder that owns the default image, once some stage has seen its key; `place` 1: who inherits it."""
    [[key]] = {tuple(keys) for name in c.stages for keys in c[name].keys}
    encoders = [name for name in c.stages if name.startswith("E")]
    return encoders[owners(key, encoders)[place]]


def encodings(c: Cluster) -> int:
    return sum(len(stage.calls) for name, stage in c.stages.items() if name.startswith("E"))


async def test_a_known_feature_is_not_encoded_again() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        for _ in range(3):
            assert (await c.ask()).status_code == 200
        assert len(c["E0"].calls) == 1 and c.metric("epd_proxy_encode_skipped_total") == 2
        assert (await c.ask(*coloured("red", "blue"))).status_code == 200
        assert c["E0"].keys[1] != c["E0"].keys[0] and len(c["E0"].keys[1]) == 1, "only the new one"


async def test_an_announced_feature_is_not_encoded_and_one_that_failed_is() -> None:
    async with cluster("E0", "PD0") as c:
        assert (await c.ask()).status_code == 200
        [[key]] = c["E0"].keys
        c.pipeline.dispatcher.dispatch(FeatureReady(key, 100, "E0-life1", pooled=True))
        assert (await c.ask()).status_code == 200 and len(c["E0"].calls) == 1
        c.pipeline.dispatcher.dispatch(FeatureFailed(key, "no room"))
        assert (await c.ask()).status_code == 200 and len(c["E0"].calls) == 2


async def test_what_the_hosts_arena_holds_is_not_encoded_and_what_it_has_lost_is() -> None:
    path = Path(f"/dev/shm/epd-test-{uuid4().hex}-arena")
    arena = Arena.create(path, 16 * 4096, slots=8, owners=4)
    try:
        async with cluster("E0", "PD0", config=settings(arena=str(path))) as c:
            assert (await c.ask()).status_code == 200
            [[key]] = c["E0"].keys
            arena.put(key, b"feature", shape=(7,), dtype="uint8")
            assert (await c.ask()).status_code == 200 and len(c["E0"].calls) == 1
            c.pipeline.dispatcher.dispatch(FeatureReady(key, 7, "E0-life1"))
            arena.remove(key)
            assert (await c.ask()).status_code == 200 and len(c["E0"].calls) == 2
    finally:
        arena.close()
        Arena.unlink(path)


async def test_64_duplicates_over_two_encoders_and_two_proxies_are_encoded_where_they_meet() -> None:
    """Each proxy asks once, both ask the same encoder: that one's own coalescing makes one encoding of the two."""
    async with cluster("E0", "E1", "P0", "D0") as c, another_proxy(c) as other:
        released = asyncio.Event()
        for name in ("E0", "E1"):
            c[name].usual = once(released, encodes())
        requests = [asyncio.create_task(proxy.ask()) for _ in range(32) for proxy in (c, other)]
        for proxy in (c, other):
            await proxy.until_metric("epd_proxy_encode_coalesced_total", 31)
        released.set()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
        assert sorted(len(c[name].calls) for name in ("E0", "E1")) == [0, 2]
        assert len(c["P0"].calls) == 64
        assert len(c.pipeline._encode.flights) == 0


async def test_when_the_leaders_encoding_fails_one_retries_and_the_rest_follow() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].script.append(once(released, refuses(500, "boom")))
        c["E0"].usual = encodes()
        requests = [asyncio.create_task(c.ask()) for _ in range(8)]
        await c.until_metric("epd_proxy_encode_coalesced_total", 7)
        released.set()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
        assert len(c["E0"].calls) == 2
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_failed") == 1, "the leader's own request"
        await c.idle()
        assert len(c.pipeline._encode.flights) == 0


async def test_a_broken_encoder_is_not_asked_once_per_duplicate() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].usual = once(released, refuses(500, "boom"))
        requests = [asyncio.create_task(c.ask()) for _ in range(8)]
        await c.until_metric("epd_proxy_encode_coalesced_total", 7)
        released.set()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
        assert len(c["E0"].calls) == 2
        assert c.metric("epd_proxy_encode_fallback_total", reason="leader_failed") == 6


async def test_a_leader_whose_client_leaves_hands_over() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].script.append(hangs)
        c["E0"].usual = encodes()
        leader = asyncio.create_task(c.ask())
        await c["E0"].until(lambda stage: stage.active == 1)
        follower = asyncio.create_task(c.ask())
        await c.until_metric("epd_proxy_encode_coalesced_total", 1)
        leader.cancel()
        assert (await follower).status_code == 200
        await c["E0"].until(lambda stage: stage.cancelled == 1)
        assert len(c["E0"].calls) == 2 and c.metric("epd_proxy_encode_fallback_total", reason="leader_failed") == 0


async def test_a_refused_image_is_refused_to_everybody_who_sent_it() -> None:
    async with cluster("E0", "PD0") as c:
        released = asyncio.Event()
        c["E0"].usual = once(released, refuses(400, "bad image"))
        c["PD0"].usual = refuses(400, "bad image")
        requests = [asyncio.create_task(c.ask()) for _ in range(6)]
        await c.until_metric("epd_proxy_encode_coalesced_total", 5)
        released.set()
        answers = await asyncio.gather(*requests)
        assert {answer.status_code for answer in answers} == {400} and len(c["E0"].calls) == 2


async def test_a_dead_owners_keys_go_to_who_inherits_them() -> None:
    ids = ("E0", "E1", "E2")
    async with cluster(*ids, "PD0") as c:
        assert (await c.ask()).status_code == 200
        first, second = owner_of(c), owner_of(c, place=1)
        assert len(c[first].calls) == 1
        c[first].usual = breaks
        assert (await c.ask()).status_code == 200
        assert len(c[first].calls) == 2 and len(c[second].calls) == 1, "it inherits the retry"
        c.table.mark_down(first, "killed")
        assert (await c.ask()).status_code == 200
        assert len(c[second].calls) == 2 and encodings(c) == 4


async def test_a_known_feature_needs_no_live_encoder() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        assert (await c.ask()).status_code == 200
        c.table.mark_down("E0", "killed")
        assert (await c.ask()).status_code == 200
        assert c.metric("epd_proxy_encode_fallback_total", reason="no_encoder") == 0


def report(name: str, waiting_puts: int) -> StoreReport:
    return StoreReport(name, f"{name}-life1", 1000, 1000, 0, waiting_puts=waiting_puts)


async def test_an_encoder_whose_store_is_full_is_left_alone_until_it_reports_room() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        assert (await c.ask()).status_code == 200
        owner, other = owner_of(c), owner_of(c, place=1)
        c.table.report(report(owner, 3))
        assert (await c.ask()).status_code == 200
        assert len(c[other].calls) == 1
        c.table.report(report(other, 1))
        waiting = asyncio.create_task(c.ask())
        await c.until_metric("epd_proxy_store_waits_total", 1)
        assert encodings(c) == 2
        c.table.report(report(owner, 0))
        assert (await waiting).status_code == 200 and len(c[owner].calls) == 2


async def test_a_store_that_stays_full_does_not_hold_a_request_for_ever() -> None:
    async with cluster("E0", "PD0", config=settings(timeouts=replace(QUICK, encode_s=0.2))) as c:
        c.table.report(report("E0", 1))
        assert (await c.ask()).status_code == 200
        assert c.metric("epd_proxy_encode_fallback_total", reason="store_full") == 1 and not c["E0"].calls


async def test_an_encoder_that_falls_silent_is_given_up_long_before_its_deadline() -> None:
    config = settings(timeouts=replace(QUICK, encode_s=30.0, encode_silence_s=0.2))
    async with cluster("E0", "PD0", config=config) as c:
        c.table.report(report("E0", 0))
        c["E0"].script.append(hangs)
        asking = asyncio.create_task(c.ask())
        await c["E0"].until(lambda stage: stage.active == 1)
        await asyncio.sleep(0.3)
        c.table.report(report("PD0", 0))  # others are heard: it is E that hangs, not we that are deaf
        assert (await asyncio.wait_for(asking, 5)).status_code == 200
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_failed") == 1
        assert (await c.ask(data_url(image_file(color="green")))).status_code == 200
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_silent") == 1
        assert len(c["E0"].calls) == 1


async def test_a_proxy_that_hears_nobody_calls_no_encoder_silent() -> None:
    config = settings(timeouts=replace(QUICK, encode_silence_s=0.01))
    async with cluster("E0", "PD0", config=config) as c:
        c.table.report(report("E0", 0))
        await asyncio.sleep(0.05)
        assert (await c.ask()).status_code == 200
        assert len(c["E0"].calls) == 1


async def test_a_follower_does_not_wait_for_ever() -> None:
    config = settings(timeouts=replace(QUICK, encode_s=0.3), retries=0)
    async with cluster("E0", "PD0", config=config) as c:
        c["E0"].script.extend([hangs, hangs])
        first = asyncio.create_task(c.ask())
        await c["E0"].until(lambda stage: stage.active == 1)
        assert (await c.ask()).status_code == 200
        assert (await first).status_code == 200


async def test_a_follower_that_gave_up_does_not_come_to_lead() -> None:
    class Slow:
        """Encoders of which the first call fails when it is told to, and the call for `y` never ends."""

        def __init__(self) -> None:
            self.fail, self.calls = asyncio.Event(), list[str]()

        async def encode(self, order: Any, items: Any) -> None:
            self.calls.append(items[0].key)
            if items[0].key == "y":
                await asyncio.Event().wait()
            elif len(self.calls) == 1:
                await self.fail.wait()
            else:
                order.seats[items[0].key].land()

        def give_up(self, *_: object) -> None:
            """Nobody counts them here."""

    def wants(*keys: str) -> RequestContext:
        request = ParsedRequest(Endpoint.CHAT, {}, "m", False, (), None)
        return context(request, [LoadedItem(MediaRef(0, 0, "image_url", "x", key), "", key, 1.0) for key in keys])

    one, two, three = wants("x"), wants("x", "y"), wants("x")
    slow, patience = Slow(), replace(QUICK, encode_s=0.2)
    step = EncodeStep(services(InstanceTable(), None, settings(timeouts=patience, retries=0)))
    step._encoders = slow  # type: ignore[assignment]
    flights = step.flights
    obtain = [asyncio.create_task(step._obtain(one, one.items))]
    await asyncio.sleep(0)
    obtain.append(asyncio.create_task(step._obtain(two, two.items)))
    await until(lambda: "y" in slow.calls, "the second to have given up on x, and to wait for y")
    third = asyncio.create_task(step._obtain(three, three.items))
    await asyncio.sleep(0)
    assert "x" in flights
    slow.fail.set()
    assert await third == [], "nobody encoded x, since one who had given up was to"
    for task in obtain:
        task.cancel()
    await asyncio.wait(obtain)
    assert len(flights) == 0


@pytest.mark.parametrize("params", [None, {}, [], {"other key": {"metadata": GRID}}])
async def test_what_an_encoder_does_not_report_is_not_known(params: object) -> None:
    async with cluster("E0", "PD0") as c:
        c["E0"].usual = replies(200, {"ec_transfer_params": params})
        for _ in range(2):
            assert (await c.ask()).status_code == 200
        assert len(c["E0"].calls) == 2
