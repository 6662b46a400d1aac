"""Routes of mixed layouts: every head competes with every other, and items are encoded where the route needs it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from epd_serve.cache_ledger import packed
from epd_serve.roles import Role
from epd_serve.wire import PROMPT_XARG, CacheReport, PromptBlocks
from proxy.records.record import Record
from proxy.registry.instance_state import Work
from proxy.routing.plan import Plan, Question, View, make_plan
from proxy.routing.policy import POLICIES
from proxy.stages.prompt import prompt_nodes
from tests.proxy.fakes import (
    Cluster,
    breaks,
    chunk,
    cluster,
    data_url,
    encodes,
    hangs,
    image_body,
    image_file,
    in_flight,
    refuses,
    settings,
    streams,
    text_body,
)
from tests.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"
LARGE = data_url(image_file(280, 280))


def calls(c: Cluster) -> dict[str, int]:
    return {name: len(stage.calls) for name, stage in c.stages.items() if stage.calls}


async def asked(c: Cluster, body: dict[str, object]) -> dict[str, int]:
    """Which stages one request calls, and how often."""
    before = Counter(calls(c))
    assert (await c.client.post(CHAT, json=body)).status_code == 200
    async with asyncio.timeout(PATIENCE_S):  # `c.idle` would wait for the loads that a test has put there
        while c.metric("epd_proxy_in_flight"):
            await asyncio.sleep(0.002)
    return dict(Counter(calls(c)) - before)


async def test_text_goes_to_whichever_head_is_idle_whatever_its_kind() -> None:
    async with cluster("EPD0", "E0", "P0", "D0") as c:
        taken = [await asked(c, text_body()) for _ in range(4)]
        assert {"EPD0": 1} in taken and {"P0": 1, "D0": 1} in taken, "of equals in turn"
        with c.table.acquire("EPD0", Work.DECODE, 1000):
            assert await asked(c, text_body()) == await asked(c, text_body()) == {"P0": 1, "D0": 1}
        with c.table.acquire("P0", Work.PREFILL, 1000):
            assert await asked(c, text_body()) == await asked(c, text_body()) == {"EPD0": 1}


async def test_a_head_that_encodes_for_itself_waits_for_no_encoder_in_a_mixed_layout() -> None:
    async with cluster("EPD0", "E0", "P0", "D0", wanted=(Role.EPD, Role.E, Role.P, Role.D)) as c:
        with c.table.acquire("P0", Work.PREFILL, 10_000):
            assert await asked(c, image_body(LARGE)) == {"EPD0": 1}
        with c.table.acquire("EPD0", Work.DECODE, 10_000):
            assert await asked(c, image_body(LARGE)) == {"E0": 1, "P0": 1, "D0": 1}
        assert c.metric("epd_proxy_encode_fallback_total", reason="no_encoder") == 0


async def test_what_encoders_have_to_do_counts_against_the_heads_that_wait_for_them() -> None:
    async with cluster("E0", "PD0", "EP0", "D0") as c:
        with c.table.acquire("E0", Work.ENCODE, 10_000):
            assert await asked(c, image_body(LARGE)) == {"EP0": 1, "D0": 1}
            with c.table.acquire("EP0", Work.PREFILL, 20_000):
                assert await asked(c, image_body(LARGE)) == {"E0": 1, "PD0": 1}
        with c.table.acquire("EP0", Work.PREFILL, 1000):
            assert await asked(c, text_body()) == {"PD0": 1}


async def test_with_every_encoder_down_a_mixed_layout_goes_where_none_is_needed() -> None:
    async with cluster("E0", "PD0", "EP0", "D0", wanted=(Role.E, Role.PD, Role.EP, Role.D)) as c:
        c.table.mark_down("E0", "killed")
        with c.table.acquire("EP0", Work.PREFILL, 10_000):
            assert await asked(c, image_body(LARGE)) == {"EP0": 1, "D0": 1}
        c.table.mark_down("EP0", "killed")
        assert await asked(c, image_body(LARGE)) == {"PD0": 1}


async def test_encoded_items_go_where_they_are_of_use_though_another_head_has_less_to_do() -> None:
    async with cluster("EPD0", "E0", "P0", "D0") as c:
        busy = c.table.acquire("EPD0", Work.DECODE, 10_000)
        released = asyncio.Event()

        async def slow(*arguments: object) -> None:
            await released.wait()
            await encodes()(*arguments)  # type: ignore[arg-type]

        c["E0"].script.append(slow)
        request = asyncio.create_task(c.client.post(CHAT, json=image_body(LARGE)))
        await c["E0"].until(lambda stage: stage.active == 1)
        busy.release()
        with c.table.acquire("P0", Work.PREFILL, 10_000):
            released.set()
            assert (await request).status_code == 200
        assert len(c["P0"].calls) == 1 and not c["EPD0"].calls


async def test_a_request_whose_own_encoding_head_fails_is_encoded_apart_before_it_goes_elsewhere() -> None:
    async with cluster("EPD0", "E0", "P0", "D0") as c:
        c["EPD0"].usual = breaks
        with c.table.acquire("P0", Work.PREFILL, 10_000):
            assert await asked(c, image_body(LARGE)) == {"EPD0": 1, "E0": 1, "P0": 1, "D0": 1}
        assert c["E0"].keys == c["P0"].keys


async def test_a_request_whose_items_are_encoded_takes_its_pixels_where_no_other_head_is_left() -> None:
    async with cluster("EPD0", "E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        c["P0"].usual = breaks
        c["D0"].usual = hangs
        with c.table.acquire("EPD0", Work.DECODE, 10_000):
            response = await asked(c, image_body(LARGE))
        assert response == {"E0": 1, "P0": 1, "D0": 1, "EPD0": 1}
        [part] = [part for part in c["EPD0"].calls[0].body["messages"][0]["content"] if part["type"] == "image_url"]
        assert part["image_url"]["url"] == LARGE


async def test_what_needs_one_instance_goes_to_one_in_a_mixed_layout() -> None:
    async with cluster("E0", "PD0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        with c.table.acquire("PD0", Work.DECODE, 10_000):
            assert await asked(c, image_body(LARGE, prompt_logprobs=1)) == {"E0": 1, "PD0": 1}


async def test_prefill_answers_alone_about_what_an_encoder_has_seen() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        assert await asked(c, image_body(LARGE, prompt_logprobs=1)) == {"E0": 1, "P0": 1}
        body = c["P0"].calls[0].body
        assert "kv_transfer_params" not in body and body["prompt_logprobs"] == 1


async def test_suspended_instances_are_asked_only_where_nobody_else_is() -> None:
    async with cluster("P0", "P1", "D0") as c:
        c.table.suspend("P0", "P0-life1", True)
        assert [await asked(c, text_body()) for _ in range(3)] == [{"P1": 1, "D0": 1}] * 3
        c.table.mark_down("P1", "killed")
        assert await asked(c, text_body()) == {"P0": 1, "D0": 1}


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_no_load_is_leaked_whatever_the_ending(policy: str) -> None:
    """Success, an error, a broken stage, a refusal, a failed stream, a client that leaves: at every kind of stage."""
    ids = ("E0", "E1", "P0", "D0", "PD0", "EPD0")
    async with cluster(*ids, config=settings(policy=policy)) as c:
        for turn, ending in enumerate(
            (None, refuses(500, "boom"), breaks, refuses(400, "no"), streams(chunk("a"), then="break"))
        ):
            for name in ids:
                if ending is not None:
                    c[name].script.append(ending)
            for body in (image_body(LARGE, seed=turn), text_body(seed=turn)):  # or they would be poisonous
                await c.client.post(CHAT, json=body)
            for stage in c.stages.values():
                stage.script.clear()
        for name in ids:
            c[name].usual = hangs
        leaving = [asyncio.create_task(c.client.post(CHAT, json=body)) for body in (image_body(LARGE), text_body())]
        await c.until_metric("epd_proxy_in_flight", 2)
        for request in leaving:
            request.cancel()
        await c.idle()
        assert in_flight(c.table) == 0
        assert {view.load for view in c.table.snapshot()} == {0.0}


async def test_a_request_is_planned_once_and_again_only_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[Question] = []
    reasons: list[str] = []

    def counted(question: Question, view: View, policy: str, because: str) -> Plan | None:
        asked_for.append(question)
        return make_plan(question, view, policy, because)

    def planned(record: Record, plan: Plan) -> None:
        reasons.append(plan.because)

    monkeypatch.setattr("proxy.generate.router.make_plan", counted)
    monkeypatch.setattr(Record, "planned", planned)

    async def reasons_of(c: Cluster, body: dict[str, object]) -> list[str]:
        asked_for.clear()
        reasons.clear()
        assert (await c.client.post(CHAT, json=body)).status_code == 200
        assert len(asked_for) == len(reasons)
        return list(reasons)

    async with cluster("E0", "P0", "D0", "D1") as c:
        c["E0"].usual = encodes()
        assert await reasons_of(c, text_body()) == ["it arrived"]
        assert await reasons_of(c, image_body(LARGE)) in (["its items are being encoded"], ["its items are encoded"])
        c.table.suspend("D1", "D1-life1", True)
        c["D0"].script.append(breaks)
        assert await reasons_of(c, text_body(seed=1)) == ["it arrived", "D0: stage_failed"]
    async with cluster("EPD0", "E0", "P0", "D0") as c:
        with c.table.acquire("P0", Work.PREFILL, 10_000):
            assert await reasons_of(c, image_body(LARGE)) == ["it arrived"], "EPD0 encodes for itself"
        with c.table.acquire("EPD0", Work.DECODE, 10_000):
            first, second = await reasons_of(c, image_body(LARGE, seed=1))
            assert first == "it arrived" and second.startswith("its items are")


def on_devices(c: Cluster, devices: dict[str, int]) -> None:
    for name, device in devices.items():
        c.table.apply(replace(c.instances[name], devices=(device,)))


TWO_DEVICES = {"E0": 0, "PD0": 0, "E1": 1, "PD1": 1}


async def test_text_goes_past_a_device_that_encodes_to_an_equal_one_that_does_not() -> None:
    async with cluster(*TWO_DEVICES) as c:
        on_devices(c, TWO_DEVICES)
        for busy, idle in (("E0", "PD1"), ("E1", "PD0")):
            with c.table.acquire(busy, Work.ENCODE, 1000):
                assert await asked(c, text_body()) == await asked(c, text_body()) == {idle: 1}
        with c.table.acquire("E0", Work.ENCODE, 1000), c.table.acquire("PD1", Work.DECODE, 1000):
            assert await asked(c, text_body()) == {"PD0": 1}, "turns with an encoder are better than a queue"


async def test_an_image_is_encoded_beside_the_instance_that_has_less_to_do() -> None:
    async with cluster(*TWO_DEVICES) as c:
        on_devices(c, TWO_DEVICES)
        c["E0"].usual = c["E1"].usual = encodes()
        for number, (busy, encoder, head) in enumerate((("PD0", "E1", "PD1"), ("PD1", "E0", "PD0"))):
            with c.table.acquire(busy, Work.DECODE, 5000):
                for image in range(2):
                    body = image_body(data_url(image_file(280, 280 + 2 * number + image)))
                    assert await asked(c, body) == {encoder: 1, head: 1}


def cached_at(c: Cluster, name: str, messages: list[dict[str, str]], blocks: int, seq: int = 1) -> None:
    """The instance says that it has been given this prompt, and holds so many blocks of 16 tokens of it."""
    nodes = prompt_nodes({**text_body(), "messages": messages}, {}).nodes
    told = PromptBlocks(packed(nodes), packed(range(blocks)))
    instance = c.instances[name]
    c.table.report(CacheReport(name, instance.incarnation, seq, 16, stored=packed(range(blocks)), prompts=[told]))


async def test_a_later_turn_goes_where_the_earlier_ones_are_cached_until_that_is_busier_than_it_is_worth() -> None:
    turns = [{"role": "user", "content": "talk"}]
    later = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    async with cluster("PD0", "PD1", "PD2") as c:
        cached_at(c, "PD1", turns, blocks=100)
        for _ in range(3):
            assert await asked(c, {**text_body(), "messages": later}) == {"PD1": 1}
        with c.table.acquire("PD1", Work.DECODE, 1000):
            assert await asked(c, {**text_body(), "messages": later}) == {"PD1": 1}
        with c.table.acquire("PD1", Work.DECODE, 2000):
            assert "PD1" not in await asked(c, {**text_body(), "messages": later})
        assert c.metric("epd_proxy_prefix_tokens_total", which="prefill") == 4 * 1600
        c.table.remove("PD1")
        assert "PD1" not in await asked(c, {**text_body(), "messages": later})


async def test_its_nodes_reach_the_stages_unless_routing_by_them_is_off() -> None:
    for on in (True, False):
        async with cluster("P0", "D0", config=settings(prefix_routing=on)) as c:
            await c.client.post(CHAT, json=text_body())
            told = [call.body.get("vllm_xargs") or {} for name in ("P0", "D0") for call in c[name].calls]
            assert len(told) == 2 and all((PROMPT_XARG in one) is on for one in told)
