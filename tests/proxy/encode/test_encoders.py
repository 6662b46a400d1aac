"""Calls to encoders: one per item, small ones together, and what fails is tried elsewhere without the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.errors import DeadlineError, StageError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import FeatureReady, StageReport
from proxy.context import RequestContext
from proxy.encode.encoders import EncodeOrder, Encoders, SingleFlight
from proxy.errors import StageRefusal
from proxy.fields.parts import MediaRef
from proxy.media.loader import LoadedItem
from proxy.registry.table import InstanceTable
from proxy.request.parse import Endpoint, ParsedRequest
from tests.proxy.fakes import (
    Cluster,
    breaks,
    cluster,
    context,
    data_url,
    encodes,
    hangs,
    image_file,
    in_flight,
    refuses,
    services,
)

SIDE = 460  # 270 tokens: a call of its own


def images(count: int, side: int = SIDE) -> list[str]:
    return [data_url(image_file(side, side, color=f"#{index:02x}0000")) for index in range(count)]


def encoded_by(c: Cluster) -> dict[str, list[list[str]]]:
    return {name: c[name].keys for name in c.stages if name.startswith("E")}


async def test_each_item_has_a_call_of_its_own_and_small_ones_share_one() -> None:
    async with cluster("E0", "PD0") as c:
        assert (await c.ask(*images(2), *images(2, side=28))).status_code == 200
        assert sorted(len(keys) for keys in c["E0"].keys) == [1, 1, 2]


async def test_calls_go_out_in_the_order_of_the_prompt_whoever_they_are_for() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        shown = images(4)
        assert (await c.ask(*shown)).status_code == 200
        places = {await keys_of(url): place for place, url in enumerate(shown)}
        for name in ("E0", "E1"):
            called = [places[key] for [key] in c[name].keys]
            assert len(called) == 2 and called == sorted(called)


async def test_an_item_is_known_as_soon_as_it_is_done_and_not_when_its_request_is() -> None:
    async with cluster("E0", "PD0") as c:
        first, second = images(2)
        c["E0"].script.extend([encodes(), hangs])
        both = asyncio.create_task(c.ask(first, second))
        await c.until_metric("epd_proxy_stage_seconds_count", 1, stage="E", outcome="ok")
        await c["E0"].until(lambda stage: len(stage.calls) == 2)
        [done] = c["E0"].keys[0]
        url = first if done == (await keys_of(first)) else second
        assert (await c.ask(url)).status_code == 200, "another request has the use of it"
        assert len(c["E0"].calls) == 2 and not both.done()
        both.cancel()
        await c.idle()


async def keys_of(url: str) -> str:
    async with cluster("E0", "PD0") as c:
        await c.ask(url)
        [[key]] = c["E0"].keys
        return key


async def test_only_the_items_that_failed_are_encoded_again_and_each_elsewhere() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        c["E0"].script.append(refuses(500, "boom"))
        c["E0"].usual = c["E1"].usual = encodes()
        assert (await c.ask(*images(4))).status_code == 200
        e0, e1 = ([key for [key] in c[name].keys] for name in ("E0", "E1"))
        assert len(e0) + len(e1) == 5 and set(e0) & set(e1) == {e0[0]}
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_failed") == 0


async def test_an_encoder_that_dies_loses_its_own_items_only() -> None:
    async with cluster("E0", "E1", "E2", "PD0") as c:
        c["E0"].usual = breaks
        c["E1"].usual = c["E2"].usual = encodes()
        assert (await c.ask(*images(4))).status_code == 200
        lost = {key for [key] in c["E0"].keys}
        others = [key for name in ("E1", "E2") for [key] in c[name].keys]
        assert len(others) == len(set(others)) == 4 and lost <= set(others)


async def test_one_bad_item_of_a_shared_call_does_not_take_the_others_with_it() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        small = images(3, side=28)
        bad = await keys_of(small[0])

        async def behave(stage: Any, call: Any, receive: Any, send: Any) -> None:
            poisoned = any(part["uuid"] == bad for part in call.body["messages"][0]["content"])
            await (refuses(500, "boom") if poisoned else encodes())(stage, call, receive, send)

        c["E0"].usual = c["E1"].usual = behave
        assert (await c.ask(*small)).status_code == 200
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_failed") == 1, "the bad one alone"


async def test_what_an_encoder_announced_before_it_died_is_not_encoded_again() -> None:
    async with cluster("E0", "E1", "PD0") as c:

        async def announces_and_dies(stage: Any, call: Any, receive: Any, send: Any) -> None:
            for part in call.body["messages"][0]["content"]:
                c.pipeline.dispatcher.dispatch(FeatureReady(part["uuid"], 100, f"{stage.id}-life1", pooled=True))
            await breaks(stage, call, receive, send)

        c["E0"].usual = c["E1"].usual = announces_and_dies
        assert (await c.ask(*images(3))).status_code == 200
        assert sum(len(keys) for keys in encoded_by(c).values()) == 3


async def test_suspended_encoders_get_items_only_where_there_are_no_others() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        c.table.suspend("E0", "E0-life1", True)
        assert (await c.ask(*images(4))).status_code == 200
        assert not c["E0"].calls and len(c["E1"].calls) == 4
        c.table.mark_down("E1", "killed")
        assert (await c.ask(data_url(image_file(color="green")))).status_code == 200
        assert len(c["E0"].calls) == 1


class Stages:
    """Encoders whose calls end as they are told, one by one: well, with an error, by being left, or after a while."""

    def __init__(self, endings: list[str], speeds: Mapping[str, float] | None = None) -> None:
        self.endings = endings
        self.speeds = speeds
        self.items: dict[str, int] = {}

    async def post(self, instance: Instance, path: str, body: bytes, headers: object, *, timeout_s: float) -> Any:
        self.items[instance.id] = self.items.get(instance.id, 0) + 1
        ending = self.endings.pop() if self.endings else "ok"
        if ending == "later":
            await asyncio.sleep(0)
        if ending == "error":
            raise StageError("boom", stage=instance.id)
        if ending == "late":
            raise DeadlineError("late")
        if ending == "refusal":
            raise StageRefusal("bad image", status=400, error_type="invalid_request_error", param=None, code=None)
        if ending == "hangs":
            await asyncio.Event().wait()
        if ending == "down":
            raise StageError("gone", stage=instance.id)
        return {"ec_transfer_params": {}}


def encoders(stages: Stages, count: int) -> tuple[Encoders, InstanceTable]:
    table = InstanceTable()
    for index in range(count):
        table.apply(Instance(f"E{index}", Role.E, f"http://E{index}", "1"))
    return Encoders(services(table, stages)), table


def job(costs: list[int]) -> RequestContext:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": [{} for _ in costs]}]}
    request = ParsedRequest(Endpoint.CHAT, body, "m", False, (), None)
    items = [
        LoadedItem(MediaRef(0, index, "image_url", "x", "x"), "", f"key {index}", cost)
        for index, cost in enumerate(costs)
    ]
    return context(request, items)


def seated(work: RequestContext) -> EncodeOrder:
    """The order of one who leads the flights of all its items."""
    flights = SingleFlight()
    return EncodeOrder(work, {item.key: flights.join(item.key) for item in work.items})


ENDINGS = st.lists(st.sampled_from(["ok", "later", "error", "late", "refusal", "hangs"]), max_size=12)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 4), ENDINGS, st.integers(0, 6))
def test_no_load_is_leaked_and_no_item_lost_whatever_the_calls_end_in(
    costs: list[int], count: int, endings: list[str], leave_after: int
) -> None:
    """A request whose calls hang is left by its client after a few turns of the event loop."""

    async def encode() -> None:
        under_test, table = encoders(Stages(list(endings)), count)
        work = job(costs)
        order = seated(work)
        task = asyncio.create_task(under_test.encode(order, work.items))
        for _ in range(leave_after if "hangs" in endings else 200):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert in_flight(table) == 0
        assert all(view.load == 0 for view in table.snapshot())
        if set(endings) <= {"ok", "later"}:
            assert all(seat.landed for seat in order.seats.values())

    asyncio.run(encode())


def test_the_load_of_every_call_is_there_before_the_next_choice() -> None:
    async def encode() -> dict[str, int]:
        stages = Stages(["hangs"] * 8)
        under_test, table = encoders(stages, 4)
        orders = [job([300]) for _ in range(8)]
        for index, one in enumerate(orders):
            one.items = (replace(one.items[0], key=f"key {index}"),)
        tasks = [asyncio.create_task(under_test.encode(seated(one), one.items)) for one in orders]
        for _ in range(20):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert in_flight(table) == 0
        return stages.items

    assert max(asyncio.run(encode()).values()) <= 3


async def test_an_encoder_that_says_it_is_slow_gets_less() -> None:
    stages = Stages([])
    under_test, table = encoders(stages, 3)
    for name, rate in (("E0", 100.0), ("E1", 1000.0), ("E2", 1000.0)):
        table.report(StageReport(name, "1", 1, item_tokens_per_s=rate))
    work = job([300] * 10)
    await under_test.encode(seated(work), work.items)
    assert stages.items.get("E0", 0) == 0 and stages.items["E1"] + stages.items["E2"] == 10
