"""Requests that kill stages, through the whole front door: what they cost, and what those beside them notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from epd_serve.wire import StageReport
from proxy.admission.queue import Kind
from proxy.config.limits import PoisonLimits
from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    QUICK,
    Call,
    Cluster,
    FakeStage,
    answer,
    breaks,
    chunk,
    cluster,
    data_url,
    encodes,
    hangs,
    image_body,
    image_file,
    once,
    refuses,
    settings,
    streams,
    text_body,
)
from tests.waiting import PATIENCE_S

CHAT = Endpoint.CHAT.value
POISON = "the poison"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths count however soon one follows the other, and nobody waits apart."""
    monkeypatch.setattr("proxy.stages.poison.TOGETHER_S", 0.0)


def dies_of_poison(c: Cluster, *, after_s: float = 0.0, answers_after_s: float = 0.05) -> Callable[..., Any]:
    """Stages that die of one body, `after_s` after they got it, with everything that they have. Each lives again at
    once, as another incarnation."""

    async def behave(stage: FakeStage, call: Call, receive: Any, send: Any) -> None:
        dead = ends.setdefault(stage.id, asyncio.Event())
        if POISON in str(call.body):
            await asyncio.sleep(after_s)
            if dead.is_set():  # of another copy
                await breaks(stage, call, receive, send)
                return
            deaths[stage.id] = deaths.get(stage.id, 0) + 1
            ends[stage.id] = asyncio.Event()
            dead.set()
            c.instances[stage.id] = replace(c.instances[stage.id], incarnation=f"{stage.id}-life{deaths[stage.id] + 1}")
            c.table.apply(c.instances[stage.id])
            await breaks(stage, call, receive, send)
            return
        try:
            async with asyncio.timeout(answers_after_s):
                await dead.wait()
        except TimeoutError:
            await answer(stage, call, receive, send)
        else:
            await breaks(stage, call, receive, send)

    ends: dict[str, asyncio.Event] = {}
    deaths: dict[str, int] = {}
    behave.deaths = deaths  # type: ignore[attr-defined]
    for stage in c.stages.values():
        stage.usual = behave
    return behave


@pytest.mark.parametrize(("together_s", "instances"), [(0.0, 2), (0.2, 3)])
async def test_a_poisonous_body_costs_two_instances_or_three_at_once_and_is_refused_then(
    monkeypatch: pytest.MonkeyPatch, together_s: float, instances: int
) -> None:
    monkeypatch.setattr("proxy.stages.poison.TOGETHER_S", together_s)
    async with cluster("PD0", "PD1", "PD2", "PD3") as c:
        behave = dies_of_poison(c)
        first = await c.client.post(CHAT, json=text_body(user=POISON))
        assert first.status_code == 422 and first.json()["error"]["code"] == "poisonous_request"
        for _ in range(3):
            again = await c.client.post(CHAT, json=text_body(user=POISON))
            assert again.status_code == 422 and again.json()["error"]["type"] == "invalid_request_error"
        assert sum(behave.deaths.values()) == instances  # type: ignore[attr-defined]
        assert c.metric("epd_proxy_poisonous_total") == 1
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200


@pytest.mark.usefixtures("at_once")
async def test_the_two_deaths_may_come_from_two_requests_of_clients() -> None:
    async with cluster("PD0", "PD1", "PD2", config=settings(retries=0)) as c:
        behave = dies_of_poison(c)
        assert [(await c.client.post(CHAT, json=text_body(user=POISON))).status_code for _ in range(3)] == [
            502,
            422,
            422,
        ]
        assert sum(behave.deaths.values()) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("after_s", "answers_after_s"), [(0.0, 0.05), (0.01, 0.3), (0.18, 0.1), (0.18, 0.3), (0.6, 0.1), (0.6, 0.9)]
)
async def test_innocents_beside_a_poisonous_body_all_succeed(
    monkeypatch: pytest.MonkeyPatch, after_s: float, answers_after_s: float
) -> None:
    """It kills at once, just within the time in which deaths count as one, and later; others are quicker and slower."""
    monkeypatch.setattr("proxy.stages.poison.TOGETHER_S", 0.2)
    async with cluster("PD0", "PD1", "PD2") as c:
        behave = dies_of_poison(c, after_s=after_s, answers_after_s=answers_after_s)
        poisonous: list[asyncio.Task[Any]] = []
        requests = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=n))) for n in range(30)]
        for stage in c.stages.values():
            await stage.until(lambda stage: stage.active >= 5)
        poisonous.append(asyncio.create_task(c.client.post(CHAT, json=text_body(user=POISON))))
        requests += [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=n))) for n in range(30, 60)]
        answers = await asyncio.gather(*requests)
        assert [one.json()["error"] for one in answers if one.status_code != 200] == []
        assert (await poisonous[0]).status_code == 422
        assert sum(behave.deaths.values()) <= (3 if answers_after_s <= 0.1 else 7)  # type: ignore[attr-defined]
        assert c.metric("epd_proxy_suspects", state="suspected") == 0
        await c.idle()


async def all_die_with_pd0(c: Cluster, count: int) -> list[asyncio.Task[Any]]:
    """`count` requests under which PD0 dies; all other instances, which come up only then, never answer."""
    dead = asyncio.Event()
    for name, stage in c.stages.items():
        stage.usual = once(dead, breaks) if name == "PD0" else hangs
        if name != "PD0":
            c.table.mark_down(name, "not yet")
    requests = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=n))) for n in range(count)]
    await c["PD0"].until(lambda stage: stage.active >= count)
    for name in c.stages.keys() - {"PD0"}:
        c.table.apply(replace(c.instances[name], incarnation=f"{name}-life2"))
    c.table.mark_down("PD0", "died")
    dead.set()
    return requests


async def all_die_with(stage: FakeStage, requests: int) -> None:
    """Once so many are there."""
    dead = asyncio.Event()
    stage.usual = once(dead, breaks)
    await stage.until(lambda stage: stage.active >= requests)
    dead.set()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("requests", [1, 2, 30])
async def test_a_request_is_given_up_for_two_deaths_unless_it_had_neighbours(requests: int) -> None:
    """All of them are too old to be suspected of either death."""
    async with cluster("PD0", "PD1", "PD2", config=settings(poison=PoisonLimits(blame_s=1e-9))) as c:
        for name in ("PD1", "PD2"):
            c.table.mark_down(name, "not yet")
        sent = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=n))) for n in range(requests)]
        for name, following in (("PD0", "PD1"), ("PD1", "PD2")):
            dying = asyncio.create_task(all_die_with(c[name], requests))
            await c[name].until(lambda stage: stage.active >= requests)
            c.table.mark_down(name, "died")
            c.table.mark_up(following)
            await dying
        answers = await asyncio.gather(*sent)
        assert {one.status_code for one in answers} == ({502} if requests == 1 else {200})
        assert len(c["PD2"].calls) == (0 if requests == 1 else requests)
        await c.idle()


async def leave(requests: list[asyncio.Task[Any]]) -> None:
    for task in requests:
        task.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def test_those_who_wait_apart_hold_no_place_and_keep_no_instance_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.stages.poison.TOGETHER_S", 20.0)
    async with cluster("PD0", "PD1", "PD2") as c:
        queue = c.pipeline.gate.queue
        requests = await all_die_with_pd0(c, 12)
        async with asyncio.timeout(PATIENCE_S):
            while c["PD1"].active + c["PD2"].active < 12:
                await asyncio.sleep(0.002)
        for name in ("PD1", "PD2"):  # with all that are tried once more
            c.table.mark_down(name, "died")
            c.table.apply(replace(c.instances[name], incarnation=f"{name}-life3"))
        async with asyncio.timeout(PATIENCE_S):
            while queue.served(Kind.TEXT) or queue.waiting(Kind.TEXT) != 12:
                await asyncio.sleep(0.002)
        assert not any(task.done() for task in requests)
        unrelated = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=100 + n))) for n in range(20)]
        for name in ("PD1", "PD2"):
            await c[name].until(lambda stage: stage.active >= 10)
        await leave(requests + unrelated)
        await c.idle()


async def test_after_a_death_all_who_were_there_are_served_again_at_once_however_long_each_takes() -> None:
    config = settings(timeouts=replace(QUICK, instance_wait_s=0.05))
    async with cluster("PD0", "PD1", "PD2", config=config) as c:
        requests = await all_die_with_pd0(c, 30)
        async with asyncio.timeout(PATIENCE_S):
            while c["PD1"].active + c["PD2"].active < 30:
                assert not any(task.done() for task in requests)
                await asyncio.sleep(0.002)
        await leave(requests)
        await c.idle()


async def test_a_refused_connection_and_a_typed_refusal_are_no_deaths() -> None:
    async with cluster("PD0", "PD1") as c:
        for stage in c.stages.values():
            stage.script.append(refuses(503, "not now"))
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        assert c.metric("epd_proxy_deaths_total", stage="PD0") == 0
        assert c.metric("epd_proxy_suspects", state="suspected") == 0


@pytest.mark.usefixtures("at_once")
async def test_an_engine_that_says_that_it_is_dead_has_died() -> None:
    async with cluster("PD0", "PD1", "PD2") as c:
        for stage in c.stages.values():
            stage.usual = refuses(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        assert (await c.client.post(CHAT, json=text_body())).status_code == 422
        assert sum(len(stage.calls) for stage in c.stages.values()) == 2


async def test_an_engine_that_says_that_it_is_dead_is_not_asked_again_before_its_next_life() -> None:
    """Its server answers so for seconds; asking it again would cost retries and win nothing."""
    config = settings(retries=1, timeouts=replace(QUICK, instance_wait_s=PATIENCE_S))
    async with cluster("P0", "D0", config=config) as c:
        c["P0"].usual = refuses(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        requests = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=n))) for n in range(8)]
        async with asyncio.timeout(PATIENCE_S):
            while c.table.is_alive("P0", "P0-life1"):
                await asyncio.sleep(0.002)
        asked = len(c["P0"].calls)
        requests.append(asyncio.create_task(c.client.post(CHAT, json=text_body(seed=9))))
        c.table.mark_down("P0", "killed by SIGKILL", incarnation="P0-life1")
        c["P0"].usual = answer
        c.table.apply(replace(c.instances["P0"], incarnation="P0-life2"))
        assert {one.status_code for one in await asyncio.gather(*requests)} == {200}
        assert len(c["P0"].calls) <= max(asked, 8) + 9, "once before, and once after"
        await c.idle()


async def test_a_stage_that_only_quotes_these_words_goes_on_being_asked() -> None:
    async with cluster("PD0") as c:
        c["PD0"].script.append(refuses(500, "no tool 'EngineCore encountered an issue'"))
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        assert c.table.is_alive("PD0", "PD0-life1")


async def test_what_dies_after_the_first_byte_is_not_held_against_the_body() -> None:
    async with cluster("PD0") as c:
        c["PD0"].usual = streams(chunk("a"), then="break")
        for _ in range(3):
            await c.aborted_stream(text_body(stream=True))
        assert c.metric("epd_proxy_suspects", state="suspected") == 0


@pytest.mark.usefixtures("at_once")
async def test_an_image_that_kills_encoders_does_not_go_on_to_prefill() -> None:
    async with cluster("E0", "E1", "E2", "PD0") as c:
        for name in ("E0", "E1", "E2"):
            c[name].usual = breaks
        assert [(await c.ask()).status_code for _ in range(2)] == [422, 422]
        assert sum(len(c[name].calls) for name in ("E0", "E1", "E2")) == 2 and not c["PD0"].calls
        c["E0"].usual = c["E1"].usual = c["E2"].usual = encodes()
        assert (await c.client.post(CHAT, json=image_body(seed=1))).status_code == 200


@pytest.mark.usefixtures("at_once")
async def test_a_stage_that_hangs_of_a_body_dies_of_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.stages.circuits.CHECK_EVERY_S", 0.01)
    async with cluster("PD0", "PD1", "PD2") as c:
        hanging: set[str] = set()  # a call that has not arrived yet hangs nobody
        monkeypatch.setattr(c.table, "silence_s", lambda name, _: 11.0 if name in hanging else 0.0)
        for name, instance in c.instances.items():
            c.table.report(StageReport(name, instance.incarnation, 1))

        async def hangs_unheard(stage: FakeStage, call: Call, receive: Any, send: Any) -> None:
            hanging.add(stage.id)
            await stage.wait_disconnect(receive)

        for stage in c.stages.values():
            stage.usual = hangs_unheard
        assert (await c.client.post(CHAT, json=text_body())).status_code == 422
        assert sum(len(stage.calls) for stage in c.stages.values()) == 2


async def test_nobody_follows_one_that_waits_apart_before_it_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.stages.poison.TOGETHER_S", 20.0)
    async with cluster("E0", "E1", "PD0") as c:
        red = data_url(image_file(color="red"))
        c["E0"].usual = c["E1"].usual = breaks
        apart = asyncio.create_task(c.ask(red))
        async with asyncio.timeout(PATIENCE_S):
            while len(c["E0"].calls) + len(c["E1"].calls) < 2 or c.pipeline.gate.queue.encoding:
                await asyncio.sleep(0.002)
        c["E0"].usual = c["E1"].usual = encodes()
        async with asyncio.timeout(PATIENCE_S):
            assert (await c.ask(red, seed=1)).status_code == 200
        assert not apart.done()
        await leave([apart])
        await c.idle()
