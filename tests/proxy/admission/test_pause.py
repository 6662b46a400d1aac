"""A pause as clients see it: they wait, for longer than anybody may wait otherwise, and are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from epd_serve.roles import Role
from epd_serve.wire import StoreReport
from proxy.admission.gate import Gate
from proxy.admission.queue import Kind, Ticket
from proxy.config.limits import AdmissionLimits, Timeouts
from proxy.metrics import Metrics
from proxy.registry.table import InstanceTable, Pause
from proxy.request.parse import Endpoint
from tests.proxy.fakes import Cluster, answer, cluster, image_body, once, passed, settings, text_body
from tests.waiting import PATIENCE_S, until

CHAT = Endpoint.CHAT.value
EPD = (Role.E, Role.P, Role.D)
WAIT_S = 0.3
"""What a request may wait for its turn, and then for an instance: less than any pause here."""

HASTY = settings(
    admission=AdmissionLimits(max_wait_s=WAIT_S), timeouts=Timeouts(instance_wait_s=WAIT_S, encode_s=WAIT_S)
)


def asked(c: Cluster, count: int, body: Callable[[], dict[str, Any]] = text_body) -> list[asyncio.Task[httpx.Response]]:
    return [asyncio.create_task(c.client.post(CHAT, json=body())) for _ in range(count)]


async def codes(requests: list[asyncio.Task[httpx.Response]]) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        return [(await one).status_code for one in requests]


async def test_new_requests_wait_for_as_long_as_it_takes_and_are_answered_then() -> None:
    async with cluster("PD0", config=HASTY) as c:
        c.table.pause_for(PATIENCE_S)
        requests = asked(c, 20)
        await until(lambda: c.pipeline.gate.queue.waiting(Kind.TEXT) == 20)
        await asyncio.sleep(3 * WAIT_S)
        assert not any(one.done() for one in requests) and not c["PD0"].calls
        c.table.pause_for(0)
        assert await codes(requests) == [200] * 20


async def test_what_has_begun_goes_on() -> None:
    released = asyncio.Event()
    async with cluster("PD0", config=HASTY) as c:
        c["PD0"].usual = once(released, answer)
        begun = asked(c, 2)
        await until(lambda: c["PD0"].active == 2)
        c.table.pause_for(PATIENCE_S)
        waiting = asked(c, 1)
        await until(lambda: c.pipeline.gate.queue.waiting(Kind.TEXT) == 1)
        released.set()
        assert await codes(begun) == [200, 200] and not waiting[0].done()
        c.table.pause_for(0)
        assert await codes(waiting) == [200]


@pytest.mark.parametrize("body", [text_body, image_body])
async def test_what_was_let_through_waits_for_instances_on_their_way(
    body: Callable[[], dict[str, Any]],
) -> None:
    patient = replace(HASTY, timeouts=Timeouts(instance_wait_s=PATIENCE_S, encode_s=PATIENCE_S))
    async with cluster("E0", "P0", "D0", config=patient, wanted=EPD) as c:
        for name in ("E0", "P0", "D0"):
            c.table.drain(name)
        requests = asked(c, 1, body)
        await until(lambda: c.metric("epd_proxy_in_flight") == 1)
        c.table.pause_for(PATIENCE_S)
        for name in ("E0", "P0", "D0"):
            c.table.remove(name)
        assert (await c.client.get("/health")).json() == {"status": "paused"}
        ready = await c.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "paused")
        assert (await c.client.get("/ready?all")).status_code == 503
        for instance in c.instances.values():
            c.table.apply(replace(instance, incarnation="another"))
        c.table.pause_for(0)
        assert await codes(requests) == [200]
        assert (await c.client.get("/health")).json() == {"status": "ok"}


async def test_the_encode_step_waits_for_an_encoder_rather_than_do_without() -> None:
    async with cluster("E0", "P0", "D0", config=HASTY, wanted=EPD) as c:
        c.table.report(StoreReport("E0", c.instances["E0"].incarnation, 1, 1, 1, waiting_puts=1))
        requests = asked(c, 1, image_body)
        await until(lambda: c.metric("epd_proxy_store_waits_total"), "it is let through, and waits for room")
        c.table.pause_for(PATIENCE_S)
        c.table.remove("E0")
        await asyncio.sleep(2 * WAIT_S)
        c.table.apply(replace(c.instances["E0"], incarnation="another"))
        c.table.pause_for(0)
        assert await codes(requests) == [200] and len(c["E0"].calls) == 1


async def test_a_pause_that_nobody_ends_is_over_by_itself() -> None:
    async with cluster("PD0", config=HASTY) as c:
        c.table.pause_for(2 * WAIT_S)
        assert await codes(asked(c, 1)) == [200]


async def test_tokenizing_waits_for_an_instance_too() -> None:
    async with cluster("PD0", config=HASTY, wanted=(Role.PD,)) as c:
        c.table.remove("PD0")
        c.table.pause_for(PATIENCE_S)
        asking = asyncio.create_task(c.client.post("/tokenize", json=text_body()))
        await until(lambda: c.metric("epd_proxy_in_flight") == 1)
        c.table.apply(c.instances["PD0"])
        assert (await asking).status_code == 200


async def test_a_queue_that_stood_still_is_not_taken_for_a_slow_one() -> None:
    """Whoever comes in a pause, or right after it, is refused no sooner than before it."""
    now = 0.0
    table = InstanceTable()
    table.pause = pause = Pause(lambda: now)
    gate = Gate(settings(admission=AdmissionLimits(max_wait_s=10.0)), table, Metrics())
    queue = gate.queue
    queue.room_made = lambda: None  # nobody waits here in earnest

    def admitted() -> Ticket:
        ticket = Ticket(queue, Kind.TEXT, arrived=pause.now(), slo_s=1000.0)
        ticket.enter()
        return ticket

    first = admitted()
    assert first.goes_at_once()
    for _ in range(8):  # four a second
        ticket = admitted()
        ticket.enqueue()
        now += 0.25
        first.leave()
        assert list(queue.grants()) == [ticket]
        first = ticket
    waiting = [admitted() for _ in range(10)]
    for one in waiting:
        one.enqueue()
    before = queue.predicted_wait_s(waiting[-1])
    pause.begin(100.0)
    now += 60.0
    assert before is not None and queue.predicted_wait_s(waiting[-1]) == before
    with passed(gate):
        pass
