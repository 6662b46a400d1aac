"""The gate in front of the stages, over HTTP: order, room, refusals, and that whoever leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from epd_serve.errors import ConfigError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import StageReport, StoreReport
from proxy.admission.gate import Gate
from proxy.admission.queue import Kind, Stage
from proxy.config.limits import AdmissionLimits, Slo
from proxy.config.settings import ProxySettings
from proxy.metrics import Metrics
from proxy.registry.table import InstanceTable
from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    QUICK,
    Cluster,
    answer,
    breaks,
    cluster,
    data_url,
    encodes,
    hangs,
    image_body,
    image_file,
    once,
    passed,
    replies,
    settings,
    text_body,
)
from tests.waiting import PATIENCE_S

CHAT = Endpoint.CHAT.value
ONE = AdmissionLimits(sequences_per_instance=1, encodes_per_instance=1)


def narrow(**changes: Any) -> ProxySettings:
    """A stage that takes one request at a time, and a proxy that knows it."""
    limited: ProxySettings = settings(admission=replace(ONE, **changes))
    return limited


def one_place(**changes: Any) -> Gate:
    """In front of two stages, each of which takes one request at a time."""
    table = InstanceTable()
    for role in (Role.E, Role.PD):
        table.apply(Instance(f"{role}0", role, "http://x", "one"))
    return Gate(narrow(**changes), table, Metrics())


async def until_waiting(c: Cluster, kind: Kind, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while c.pipeline.gate.queue.waiting(kind) != count:
            await asyncio.sleep(0.002)


async def once_answered(c: Cluster, released: asyncio.Event) -> asyncio.Task[httpx.Response]:
    """A request that the only stage holds until `released`."""
    c["PD0"].script.append(once(released, answer))
    first = asyncio.create_task(c.client.post(CHAT, json=text_body()))
    await c["PD0"].until(lambda stage: stage.active == 1)
    return first


def within(ttft_ms: int) -> dict[str, str]:
    return {"x-epd-slo-ttft-ms": str(ttft_ms)}


@pytest.mark.parametrize(
    ("order", "served"), [("deadline", ["first", "text", "image"]), ("fcfs", ["first", "image", "text"])]
)
async def test_who_has_to_begin_soonest_overtakes_who_came_before_it(order: str, served: list[str]) -> None:
    async with cluster("EPD0", config=narrow(order=order)) as c:
        released = asyncio.Event()
        c["EPD0"].script.append(once(released, answer))
        requests = [asyncio.create_task(c.client.post(CHAT, json=text_body(user="first")))]
        await c["EPD0"].until(lambda stage: stage.active == 1)
        image = c.client.post(CHAT, json=image_body(user="image"), headers=within(300_000))
        requests.append(asyncio.create_task(image))
        await until_waiting(c, Kind.MEDIA, 1)
        text = c.client.post(CHAT, json=text_body(user="text"), headers=within(200_000))
        requests.append(asyncio.create_task(text))
        await until_waiting(c, Kind.TEXT, 1)
        assert c.metric("epd_proxy_queue_waiting", kind="media") == 1
        assert c.metric("epd_proxy_queue_work_seconds", line="serve") > 0
        released.set()
        assert {(await one).status_code for one in requests} == {200}
        assert [call.body["user"] for call in c["EPD0"].calls] == served
        await c.idle()
        assert c.metric("epd_proxy_queue_seconds_count", kind="text", line="serve") == 2
        assert c.metric("epd_proxy_queue_work_seconds", line="serve") == 0


async def test_a_priority_is_worth_seconds_of_its_deadline() -> None:
    async with cluster("PD0", config=narrow(priority_step_s=100.0)) as c:
        released = asyncio.Event()
        requests = [await once_answered(c, released)]
        for user, ttft_ms, priority in (("a", 200_000, 0), ("b", 250_000, -1), ("c", 199_000, 1)):
            body = text_body(user=user, priority=priority)
            requests.append(asyncio.create_task(c.client.post(CHAT, json=body, headers=within(ttft_ms))))
            await until_waiting(c, Kind.TEXT, len(requests) - 1)
        released.set()
        assert {(await one).status_code for one in requests} == {200}
        assert [call.body.get("user") for call in c["PD0"].calls] == [None, "b", "a", "c"]


async def test_a_loud_account_s_backlog_delays_a_quiet_one_by_a_piece() -> None:
    """Though all of the backlog is due sooner."""
    slow = narrow(prefill_tokens=1, prefill_s=0.1)  # ten tokens a second, as far as anybody knows
    async with cluster("PD0", config=replace(slow, tenant_header="x-tenant")) as c:
        released = asyncio.Event()
        requests = [await once_answered(c, released)]
        for number in range(12):
            headers = {"x-tenant": "loud", **within(600_000 + number)}
            requests.append(asyncio.create_task(c.client.post(CHAT, json=text_body(user="loud"), headers=headers)))
        await until_waiting(c, Kind.TEXT, 12)
        headers = {"x-tenant": "quiet", **within(6_000_000)}
        requests.append(asyncio.create_task(c.client.post(CHAT, json=text_body(user="quiet"), headers=headers)))
        await until_waiting(c, Kind.TEXT, 13)
        released.set()
        assert {(await one).status_code for one in requests} == {200}
        order = [call.body.get("user") for call in c["PD0"].calls]
        assert order.index("quiet") <= 2, order


async def test_a_report_wakes_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.admission.gate.RELOOK_S", 1000.0)
    async with cluster("PD0") as c:
        life = c.instances["PD0"].incarnation
        c.table.report(StageReport("PD0", life, 1, running=1, waiting=1, max_running=1))
        asked = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await until_waiting(c, Kind.TEXT, 1)
        c.table.report(StageReport("PD0", life, 2, running=1, waiting=1, max_running=1))
        assert c.pipeline.gate.queue.waiting(Kind.TEXT) == 1 and not c["PD0"].calls
        c.table.report(StageReport("PD0", life, 3, running=1, max_running=1))
        async with asyncio.timeout(PATIENCE_S):
            assert (await asked).status_code == 200


async def test_what_an_instance_can_have_done_since_it_reported_makes_room_though_nobody_says_so() -> None:
    async with cluster("PD0") as c:
        life, busy_s = c.instances["PD0"].incarnation, 0.4
        busy = {"running": 1, "max_running": 8, "pending_prompt_tokens": 4000, "prompt_tokens_per_s": 4000 / busy_s}
        c.table.report(StageReport("PD0", life, 1, **busy))  # type: ignore[arg-type]
        begun = time.monotonic()
        asked = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await until_waiting(c, Kind.TEXT, 1)
        async with asyncio.timeout(PATIENCE_S):
            assert (await asked).status_code == 200
        assert time.monotonic() - begun > busy_s - AdmissionLimits().prefill_s - 0.1


async def test_one_that_is_busy_keeps_nobody_from_another() -> None:
    """Pooled, what one has was held against both."""
    async with cluster("PD0", "PD1") as c:
        for name, pending in (("PD0", 10**9), ("PD1", 0)):
            life = c.instances[name].incarnation
            said = {"pending_prompt_tokens": pending, "prompt_tokens_per_s": 1000.0, "max_running": 64, "running": 1}
            c.table.report(StageReport(name, life, 1, **said))  # type: ignore[arg-type]
        codes = [(await c.client.post(CHAT, json=text_body())).status_code for _ in range(3)]
        assert codes == [200] * 3
        assert (len(c["PD0"].calls), len(c["PD1"].calls)) == (0, 3)


async def test_a_full_line_is_a_429_that_says_when_to_come_back() -> None:
    async with cluster("PD0", config=narrow(text_queue=1)) as c:
        released = asyncio.Event()
        c["PD0"].script.append(once(released, answer))
        requests = [asyncio.create_task(c.client.post(CHAT, json=text_body()))]
        await c["PD0"].until(lambda stage: stage.active == 1)
        requests.append(asyncio.create_task(c.client.post(CHAT, json=text_body())))
        await until_waiting(c, Kind.TEXT, 1)
        refused = await c.client.post(CHAT, json=text_body())
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert c.metric("epd_proxy_refused_total", reason="queue_full") == 1
        released.set()
        assert [(await one).status_code for one in requests] == [200, 200]


async def test_nobody_waits_for_ever() -> None:
    async with cluster("PD0", config=narrow(max_wait_s=0.05)) as c:
        released = asyncio.Event()
        c["PD0"].script.append(once(released, answer))
        first = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await c["PD0"].until(lambda stage: stage.active == 1)
        refused = await c.client.post(CHAT, json=text_body())
        assert refused.status_code == 429 and "in vain" in refused.json()["error"]["message"]
        released.set()
        assert (await first).status_code == 200
        await c.idle()
        assert len(c["PD0"].calls) == 1


async def test_whoever_leaves_while_waiting_gives_the_place_up() -> None:
    async with cluster("PD0", config=narrow()) as c:
        released = asyncio.Event()
        c["PD0"].script.append(once(released, answer))
        first = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await c["PD0"].until(lambda stage: stage.active == 1)
        leaver = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await until_waiting(c, Kind.TEXT, 1)
        leaver.cancel()
        await until_waiting(c, Kind.TEXT, 0)
        last = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await until_waiting(c, Kind.TEXT, 1)
        released.set()
        assert [(await one).status_code for one in (first, last)] == [200, 200]
        await c.idle()
        assert len(c["PD0"].calls) == 2


async def test_an_encoder_takes_no_more_requests_than_it_may() -> None:
    async with cluster("E0", "PD0", config=narrow()) as c:
        released = asyncio.Event()
        c["E0"].script.append(once(released, encodes()))
        c["E0"].usual = encodes()
        requests = [asyncio.create_task(c.client.post(CHAT, json=image_body()))]
        await c["E0"].until(lambda stage: stage.active == 1)
        requests.append(asyncio.create_task(c.ask(data_url(image_file(color="blue")))))
        await until_waiting(c, Kind.MEDIA, 1)
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200, "text waits for no encoder"
        assert c.metric("epd_proxy_queue_encoding") == 1
        released.set()
        assert [(await one).status_code for one in requests] == [200, 200]
        await c.idle()
        assert c.metric("epd_proxy_queue_encoding") == 0


async def test_one_that_waits_for_another_s_encoding_does_not_keep_it_from_encoding() -> None:
    """B has the encoding of `shared` to do and waits for a place, which A holds, who waits for `shared`."""
    own, shared = (data_url(image_file(color=color)) for color in ("red", "blue"))
    async with cluster("E0", "PD0", config=narrow()) as c:
        released, second = asyncio.Event(), asyncio.Event()
        c["E0"].script.extend([once(released, encodes()), once(second, encodes())])
        c["E0"].usual = encodes()
        requests = [asyncio.create_task(c.ask(data_url(image_file(color="green"))))]
        await c["E0"].until(lambda stage: stage.active == 1)
        requests.append(asyncio.create_task(c.ask(shared, priority=3)))  # B, in no hurry
        await until_waiting(c, Kind.MEDIA, 1)
        requests.append(asyncio.create_task(c.ask(own, shared)))  # A
        await until_waiting(c, Kind.MEDIA, 2)
        released.set()
        await c["E0"].until(lambda stage: len(stage.calls) == 2)
        assert len(c["E0"].keys[1]) == 1, "A's own image"
        second.set()
        assert [(await one).status_code for one in requests] == [200, 200, 200]
        await c.idle()
        assert c.pipeline.gate.queue.encoding == 0


async def test_one_that_is_to_be_encoded_after_all_holds_no_place_that_its_encoding_waits_for() -> None:
    """A had the room at the stages and lost its instance; it wants what B has the encoding of to do, who waits for the
    encoder's place of C, who waits for the room of A."""
    async with cluster("EPD0", "E0", "P0", "D0", config=narrow()) as c:
        for name in ("E0", "P0", "D0"):
            c.table.mark_down(name, "not yet")
        released, encoded = asyncio.Event(), asyncio.Event()
        c["EPD0"].script.append(once(released, breaks))
        c["E0"].script.append(once(encoded, encodes()))
        c["E0"].usual = encodes()
        requests = [asyncio.create_task(c.ask(n=2))]  # A
        await c["EPD0"].until(lambda stage: stage.active == 1)
        for name in ("E0", "P0", "D0"):
            c.table.mark_up(name)
        requests.append(asyncio.create_task(c.ask(data_url(image_file(color="blue")))))  # C
        await c["E0"].until(lambda stage: stage.active == 1)
        requests.append(asyncio.create_task(c.ask()))  # B
        await until_waiting(c, Kind.MEDIA, 1)
        encoded.set()
        await c["E0"].until(lambda stage: stage.active == 0)
        c.table.mark_down("EPD0", "gone")
        released.set()
        assert [(await one).status_code for one in requests] == [200, 200, 200]
        await c.idle()
        assert sorted(map(len, c["E0"].keys)) == [1, 1], "A and B share one encoding"
        queue = c.pipeline.gate.queue
        assert queue.encoding == queue.waiting(Kind.MEDIA) == queue.served(Kind.MEDIA) == 0


async def test_who_gave_a_place_back_for_others_is_not_refused_for_waiting_for_it_again() -> None:
    gate = one_place(max_wait_s=0.01)
    with passed(gate, Kind.MEDIA) as first:
        await first.to_stages()
        first.give_back()
        assert not first.served and gate.queue.waiting(Kind.MEDIA) == 1
        with passed(gate, Kind.MEDIA) as second:
            await second.to_stages()
            back = asyncio.create_task(first.to_stages())
            await asyncio.wait([back], timeout=0.05)
            assert not back.done(), "it neither got through nor was refused"
        async with asyncio.timeout(PATIENCE_S):
            await back
        await first.to_stages()  # has it already
        assert first.served and gate.queue.served(Kind.MEDIA) == 1
    assert gate.queue.served(Kind.MEDIA) == gate.queue.waiting(Kind.MEDIA) == 0


async def test_what_others_have_encoded_waits_for_no_encoder() -> None:
    async with cluster("E0", "PD0", config=narrow()) as c:
        released = asyncio.Event()
        c["E0"].script.append(once(released, encodes()))
        requests = [asyncio.create_task(c.ask()) for _ in range(4)]
        await c.until_metric("epd_proxy_encode_coalesced_total", 3)
        released.set()
        assert {(await one).status_code for one in requests} == {200}
        assert len(c["E0"].calls) == 1


@pytest.mark.parametrize("stage", list(Stage))
async def test_who_waits_for_an_instance_after_its_turn_keeps_nobody_else_waiting(stage: Stage) -> None:
    """For one that is on its way, or whose store has room again: what its turn owes is settled before that."""
    patient = replace(QUICK, instance_wait_s=PATIENCE_S)
    async with cluster("E0", "P0", "D0", config=settings(timeouts=patient)) as c:
        c["E0"].usual = encodes()
        queue, life = c.pipeline.gate.queue, c.instances["E0"].incarnation
        if stage is Stage.ENCODE:
            c.table.report(StoreReport("E0", life, 1, 1, 1, waiting_puts=1))
            requests = [asyncio.create_task(c.ask(data_url(image_file(color=color)))) for color in ("red", "blue")]
            async with asyncio.timeout(PATIENCE_S):
                while queue.encoding != 2:
                    await asyncio.sleep(0.002)
        else:
            c.table.want(tuple(one.role for one in c.instances.values()))
            c.table.mark_down("P0", "not yet")
            requests = [asyncio.create_task(c.client.post(CHAT, json=text_body())) for _ in range(2)]
            async with asyncio.timeout(PATIENCE_S):
                while queue.served(Kind.TEXT) != 2:
                    await asyncio.sleep(0.002)
        async with asyncio.timeout(PATIENCE_S):
            while any(queue.owed.values()):
                await asyncio.sleep(0.002)
        assert not any(one.done() for one in requests) and not queue.anybody
        c.table.report(StoreReport("E0", life, 1, 1, 2, waiting_puts=0))
        c.table.mark_up("P0")
        assert [(await one).status_code for one in requests] == [200, 200]
        await c.idle()


async def test_who_stops_waiting_is_not_called_while_the_rest_of_the_request_is_taken_down() -> None:
    gate = one_place()
    with passed(gate, Kind.MEDIA) as leaving, passed(gate, Kind.MEDIA) as staying:
        with passed(gate, Kind.MEDIA) as first:
            await first.to_encoders()
            waits = [asyncio.create_task(one.to_encoders()) for one in (leaving, staying)]
            await asyncio.sleep(0)
            waits[0].cancel()
            await asyncio.wait([waits[0]])
        async with asyncio.timeout(5):
            await waits[1]
        assert gate.queue.encoding == 1
    assert gate.queue.encoding == gate.queue.waiting(Kind.MEDIA) == 0


@pytest.mark.parametrize("order", ["deadline", "fcfs"])
async def test_stages_are_told_when_a_request_is_due_where_they_heed_that(order: str) -> None:
    """In ms since the epoch, so that several proxies agree."""
    limits = AdmissionLimits(order=order)  # type: ignore[arg-type]
    config = settings(stage_priorities=True, admission=limits, slo=Slo(ttft_s=20.0))
    async with cluster("E0", "P0", "D0", config=config) as c:
        c["E0"].usual = encodes()
        begun = 1000 * time.time()
        await c.client.post(CHAT, json=image_body())
        await c.client.post(CHAT, json=text_body())
        await c.client.post(CHAT, json=text_body(priority=10))
        await c.client.post(CHAT, json=text_body(), headers=within(7000))
        await c.idle()
        took = 1000 * time.time() - begun + 100  # and what their own service is expected to take
        priorities = [[call.body.get("priority") for call in c[name].calls] for name in ("P0", "D0")]
        assert priorities[0] == priorities[1], "both stages of a request order it alike"
        expected = [0, 0, 50_000, 0] if order == "fcfs" else [20_000, 20_000, 70_000, 7000]
        for priority, after in zip(priorities[0], expected, strict=True):
            assert begun + after - 100 <= priority <= begun + after + took
        assert "priority" not in c["E0"].calls[0].body


async def test_a_priority_is_kept_from_stages_that_would_refuse_it_and_bad_ones_are_named() -> None:
    async with cluster("PD0") as c:
        assert (await c.client.post(CHAT, json=text_body(priority=-5))).status_code == 200
        assert "priority" not in c["PD0"].calls[0].body
        for wrong in ("high", 1.5, True, 1 << 64):
            refused = await c.client.post(CHAT, json=text_body(priority=wrong))
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


async def test_nothing_is_left_in_the_lines_whatever_happened() -> None:
    config = settings(
        admission=AdmissionLimits(sequences_per_instance=2, encodes_per_instance=1, text_queue=8, media_queue=6),
        timeouts=replace(QUICK, first_byte_s=0.3),
    )
    async with cluster("E0", "P0", "D0", config=config) as c:
        c["E0"].script.extend([encodes(), hangs, replies(500, {}), replies(400, {})])
        c["P0"].script.extend([answer, hangs, replies(500, {}), answer, replies(400, {})])
        c["D0"].script.extend([answer, replies(500, {}), hangs, answer, hangs])

        async def one(index: int) -> None:
            body = (image_body if index % 2 else text_body)(stream=bool(index % 3), n=1 + index % 3)
            headers = {"x-epd-deadline-ms": "200"} if index % 5 == 0 else {}
            try:
                await asyncio.wait_for(c.client.post(CHAT, json=body, headers=headers), timeout=0.5)
            except TimeoutError:
                return

        await asyncio.gather(*(one(index) for index in range(24)))
        await c.idle()
        queue = c.pipeline.gate.queue
        assert not any(queue.lines.values()) and queue.encoding == 0 and not queue.anybody
        assert all(
            queue.waiting(kind) == queue.served(kind) == queue.owed[stage] == 0 for kind in Kind for stage in Stage
        )


def test_settings_of_the_lines_are_checked() -> None:
    for wrong in ({"text_queue": 0}, {"order": "lifo"}, {"encode_s": 0.0}, {"prefill_s": -1.0}, {"prefill_tokens": 0}):
        with pytest.raises(ConfigError):
            AdmissionLimits(**wrong)  # type: ignore[arg-type]
