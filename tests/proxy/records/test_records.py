"""What `epd-serve why` is told: why a request went where it went, what it waited for, and why it was turned away."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from epd_serve.image_tokens import Tiled
from proxy.config.limits import AdmissionLimits, RecordLimits, Slo
from proxy.records.counts import MINUTE_S, Counts
from proxy.records.record import Record
from proxy.records.records import FAILED, NEWEST, SLOWEST, Question
from proxy.registry.instance_state import Work
from proxy.routing.policy import UNMEASURED_RATE
from tests.proxy.fakes import (
    DONE,
    QUICK,
    Cluster,
    answer,
    cluster,
    data_url,
    encodes,
    image_body,
    image_file,
    once,
    replies,
    settings,
    streams,
    text_body,
)
from tests.proxy.generate.streams import Form
from tests.waiting import until

CHAT = "/v1/chat/completions"


def why(c: Cluster, name: str) -> dict[str, Any]:
    return c.pipeline.records.look(Question(id=name)).requests[0]


def counted(c: Cluster) -> Counts:
    counts = c.pipeline.records.look(Question(window_s=MINUTE_S)).counts
    assert counts is not None
    return counts


def listed(c: Cluster, order: str = NEWEST, limit: int = 20) -> list[dict[str, Any]]:
    return c.pipeline.records.look(Question(order=order, limit=limit)).requests


def events(told: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for one in told["events"] if one["event"] == name]


def choice(told: dict[str, Any], work: str) -> dict[str, Any]:
    """The last one of this kind."""
    found: dict[str, Any] = [one for one in told["choices"] if one["work"] == work][-1]
    return found


async def ask(c: Cluster, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    await c.client.post(CHAT, json=body or text_body(), headers={"x-request-id": name})
    await until(lambda: why(c, name)["outcome"] != "running")
    return why(c, name)


async def test_a_choice_is_told_with_what_it_went_by() -> None:
    async with cluster("PD0", "PD1") as c:
        with c.table.acquire("PD0", Work.DECODE, 2 * UNMEASURED_RATE):
            told = await ask(c, "mine")
    chosen = choice(told, "prompt")
    busy, idle = chosen["candidates"]
    assert chosen["policy"] == "first-token" and chosen["chosen"] == ["PD1"] == [told["decode"]]
    assert (busy["id"], busy["load"], busy["chosen"], idle["chosen"]) == ("PD0", 2 * UNMEASURED_RATE, False, True)
    assert busy["predicted_s"] == pytest.approx(2 + idle["predicted_s"], abs=0.001)
    assert "least predicted time" in chosen["why"]


async def test_who_goes_on_is_chosen_among_those_that_decode() -> None:
    async with cluster("P0", "D0", "D1") as c:
        with c.table.acquire("D0", Work.DECODE):
            told = await ask(c, "mine")
    assert choice(told, "prompt")["why"] == "the only one"
    decode = choice(told, "decode")
    assert decode["policy"] == "least-loaded" and decode["chosen"] == ["D1"] and len(decode["candidates"]) == 2


async def test_an_image_s_way_has_its_encoder_and_what_the_store_had() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        c["E0"].usual = c["E1"].usual = encodes()
        told = await ask(c, "first", image_body())
        assert choice(told, "encode")["chosen"] == told["encode"] and len(told["encode"]) == 1
        assert events(told, "features")[0]["in_store"] == 0
        (call,) = events(told, "encode_call")
        assert call["outcome"] == "ok" and 0 < call["s"] < 60 and [call["stage"]] == told["encode"]


async def test_of_an_image_that_encoders_share_it_is_told_which_got_which_part() -> None:
    async with cluster("E0", "E1", "PD0", config=settings(image_tokens=Tiled(8, 256, 1, 6, thumbnail=True))) as c:
        c["E0"].usual = c["E1"].usual = encodes()
        told = await ask(c, "shared", image_body(data_url(image_file(24, 8))))
        assert sorted(choice(told, "encode")["chosen"]) == ["E0", "E1"] == sorted(told["encode"])
        made = {call["stage"]: call["parts"] for call in events(told, "encode_call")}
        assert made == {name: c[name].keys[0][0].rpartition("/")[2] for name in ("E0", "E1")}
        assert set(made.values()) == {"0-2", "1-2"}


async def test_a_retry_is_told_with_its_cause_and_why_not_there_again() -> None:
    async with cluster("PD0", "PD1") as c:
        c["PD0"].script.append(replies(500, {"error": {"message": "out of luck"}}))
        c["PD1"].script.append(replies(502, {"error": {"message": "out of luck"}}))
        told = await ask(c, "mine")
    failed = events(told, "failed")
    assert [one["code"] for one in failed] == ["stage_failed"] * 2 and "out of luck" in failed[0]["message"]
    assert len(events(told, "retry")) == 2 and told["attempts"] == 3 and told["retried"]
    second = [one for one in told["choices"] if one["work"] == "prompt"][1]
    (aside,) = [one for one in second["candidates"] if one["id"] == failed[0]["stage"]]
    assert "failed there" in aside["why_not"] and aside["predicted_s"] is None


async def test_a_full_queue_explains_its_429() -> None:
    narrow = AdmissionLimits(sequences_per_instance=1, text_queue=1)
    released = asyncio.Event()
    async with cluster("PD0", config=settings(admission=narrow)) as c:
        c["PD0"].usual = once(released, answer)
        asked = [asyncio.create_task(c.client.post(CHAT, json=text_body())) for _ in range(2)]
        await until(lambda: c.metric("epd_proxy_queue_waiting", kind="text") == 1)
        refused = await c.client.post(CHAT, json=text_body(), headers={"x-request-id": "late"})
        told = why(c, "late")
        (waiting,) = [one for one in listed(c) if one["outcome"] == "running" and not one["attempts"]]
        waits = events(why(c, waiting["id"]), "waits")
        released.set()
        await asyncio.gather(*asked)
    assert refused.status_code == told["status"] == 429 and told["code"] == "overloaded"
    (why_refused,) = events(told, "refused")
    assert (why_refused["reason"], why_refused["waiting"], why_refused["with_stages"]) == ("queue_full", 1, 1)
    assert "wait already" in told["message"]
    assert waits[0]["line"] == "serve" and waits[0]["with_stages"] == 1
    (queued,) = events(why(c, waiting["id"]), "queued")
    assert "passed" not in queued, "it is told where the wait is"
    assert queued["s"] > 0 and why(c, waiting["id"])["phases_ms"]["queue"] == pytest.approx(1000 * queued["s"], abs=0.1)


@pytest.mark.parametrize("order", ["deadline", "fcfs", "sjf"])
async def test_a_wait_is_told_with_what_decided_it_and_counted(order: Any) -> None:
    narrow, released = AdmissionLimits(order=order, sequences_per_instance=1), asyncio.Event()
    async with cluster("PD0", config=settings(admission=narrow)) as c:
        c["PD0"].usual = once(released, answer)
        first = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await c.until_metric("epd_proxy_queue_served", 1, kind="text")
        headers = {"x-request-id": "hurried", "x-epd-slo-ttft-ms": "1"}
        body = text_body(messages=[{"role": "user", "content": "x" * 40_000}])
        second = asyncio.create_task(c.client.post(CHAT, json=body, headers=headers))
        await until(lambda: counted(c).lines["serve"]["waiting"] == 1)
        await until(lambda: order != "deadline" or counted(c).lines["serve"]["late"] == 1)
        lines, (running,) = counted(c).lines, why(c, "hurried")["waits"]
        released.set()
        await asyncio.gather(first, second)
        (ended,) = why(c, "hurried")["waits"]
        late = c.metric("epd_proxy_queue_late_total", line="serve")
        json.dumps(why(c, "hurried"), allow_nan=False)
    assert {name: one["waiting"] for name, one in lines.items()} == {"encode": 0, "serve": 1}
    assert lines["serve"]["work_s"] > 0 and lines["serve"]["over_share"] == 0
    assert running["s"] is None and running["line"] == "serve" and running["slo_s"] == 0.001
    assert ended["s"] > 0 and ended["passed"] == 0 and running["before_s"] == 0.0 and running["service_s"] > 0
    assert (running["slack_s"] is not None, late) == ((True, 1) if order == "deadline" else (False, 0))


async def test_a_missing_role_is_told_by_name() -> None:
    async with cluster("P0", "D0", config=settings(timeouts=replace(QUICK, instance_wait_s=0.05))) as c:
        c.table.mark_down("D0", "killed")
        told = await ask(c, "mine")
    assert (told["status"], told["code"]) == (503, "no_instance")
    assert events(told, "waited")[0]["missing"] == "D"


async def test_what_a_client_wrote_is_in_no_record() -> None:
    async with cluster("PD0") as c:
        c["PD0"].script.append(replies(400, {"error": {"message": "no such tool: gossip", "code": 400}}))
        told = await ask(c, "mine", text_body(user="gossip", n="gossip"))
        refused = await ask(c, "other", text_body(user="gossip"))
    assert "gossip" not in str(told) and "gossip" not in str(refused)
    assert (told["status"], told["param"], refused["status"]) == (400, "n", 400)


async def test_half_a_character_in_a_field_s_name_harms_no_record() -> None:
    async with cluster("PD0", config=settings(strict_fields=True)) as c:
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}], "\\ud800": 1}'
        refused = await c.client.post(CHAT, content=body, headers={"x-request-id": "half"})
        await until(lambda: why(c, "half")["outcome"] != "running")
        assert refused.status_code == why(c, "half")["status"] == 400
        assert c.metric("epd_proxy_broken_messages_total", kind="Record") == 0


async def test_lists_are_in_their_order() -> None:
    async with cluster("PD0", config=settings(retries=0)) as c:
        c["PD0"].script.append(replies(500, {}))
        for name in ("a", "b", "c"):
            await ask(c, name)
    assert [one["client_id"] for one in listed(c)] == ["c", "b", "a"]
    assert [one["client_id"] for one in listed(c, FAILED)] == ["a"]
    slowest = [one["total_s"] for one in listed(c, SLOWEST)]
    assert slowest == sorted(slowest, reverse=True) and len(slowest) == 3
    assert len(listed(c, limit=2)) == 2


async def test_a_name_that_a_client_gave_twice_is_the_newest_s() -> None:
    async with cluster("PD0") as c:
        first = await ask(c, "same")
        second = await ask(c, "same")
        found = c.pipeline.records.look(Question(id="same")).requests
    assert [one["id"] for one in found] == [second["id"], first["id"]] and first["id"] != second["id"]


async def test_nothing_is_remembered_where_nothing_may_be_but_of_running_requests() -> None:
    released = asyncio.Event()
    async with cluster("PD0", config=settings(records=RecordLimits(requests=0))) as c:
        c["PD0"].usual = once(released, answer)
        asked = asyncio.create_task(c.client.post(CHAT, json=text_body(), headers={"x-request-id": "mine"}))
        await c["PD0"].until(lambda stage: stage.active == 1)
        assert why(c, "mine")["outcome"] == "running" and why(c, "mine")["decode"] == "PD0"
        released.set()
        await asked
        await c.idle()
        assert not c.pipeline.records.look(Question(id="mine")).requests


async def test_the_last_minute_counts_what_has_ended() -> None:
    async with cluster("PD0") as c:
        for stream in (True, False):
            await c.client.post(CHAT, json=text_body(stream=stream))
        await c.client.post(CHAT, content=b"{")
        await c.idle()
        counts = counted(c)
    summary = counts.summary()
    assert summary["outcomes"] == {"200": 2, "400": 1} and summary["codes"] == {"invalid_json": 1}
    assert summary["ttft_ms"]["p50"] > 0 and summary["requests"] == 3
    assert (counts.answered, counts.serving) == (1, 1)
    assert counts.kinds["text"].requests == 2, "what makes no sense has no kind"


async def test_what_comes_is_counted_by_kind_before_anything_is_refused() -> None:
    narrow = AdmissionLimits(sequences_per_instance=1, text_queue=1)
    released = asyncio.Event()
    async with cluster("PD0", config=settings(admission=narrow)) as c:
        c["PD0"].usual = once(released, answer)
        body = text_body(stream=True, messages=[{"role": "user", "content": "x" * 400}])
        asked = [asyncio.create_task(c.client.post(CHAT, json=body)) for _ in range(2)]
        await until(lambda: c.metric("epd_proxy_queue_waiting", kind="text") == 1)
        assert (await c.client.post(CHAT, json=body)).status_code == 429
        asked.append(asyncio.create_task(c.client.post(CHAT, json=image_body())))
        await until(lambda: "media" in counted(c).kinds and counted(c).kinds["media"].known_prompts)
        early = counted(c).kinds
        released.set()
        assert {one.status_code for one in await asyncio.gather(*asked)} == {200}
        await c.client.post("/tokenize", json=text_body())
        await c.idle()
        late = counted(c).kinds
    text, media = early["text"], early["media"]
    assert (text.requests, text.known_prompts, text.ended, text.item_tokens) == (3, 2, 1, 0)
    assert 2 * 100 <= text.prompt_tokens <= 2 * 120, "four characters are a token"
    assert (media.requests, media.known_prompts, media.ended) == (1, 1, 0)
    assert 0 < media.item_tokens < media.prompt_tokens
    assert (late["text"].requests, late["text"].ended, late["text"].known_outputs) == (3, 3, 2)
    assert (late["media"].ended, late["media"].known_outputs) == (1, 0), "its stage does not say how long its answer is"
    assert late["text"].output_tokens == 2


async def test_a_sink_that_fails_costs_neither_the_client_nor_the_others() -> None:
    def fails(_: Record) -> None:
        raise ValueError

    taken: list[Record] = []
    async with cluster("PD0") as c:
        c.pipeline.records.ended[:0] = [fails, taken.append]
        told = await ask(c, "mine")
        assert (told["outcome"], taken[0].client_id) == ("200", "mine")
        assert c.metric("epd_proxy_broken_messages_total", kind="Record") == 1


async def test_the_gaps_between_a_stream_s_tokens_are_told() -> None:
    form = Form(chat=True)
    tokens = [form.event([(number, "a")]) for number in range(4)]
    async with cluster("PD0", config=settings(slo=Slo(tpot_s=0.07))) as c:
        c["PD0"].script.append(streams(*tokens[:2], tokens[2] + tokens[3] + DONE))
        told = await ask(c, "mine", text_body(stream=True))
    assert told["gaps"] == {"count": 3, "within": 3, "limit_s": 0.07}, "all in one read"
