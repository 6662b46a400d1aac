"""Attempts that go on with a stream whose stage is gone: who is asked what, and when it ends in one error after all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Receive, Send

from epd_serve.wire import StageReport
from proxy.config.limits import MigrationLimits, RetryLimits
from proxy.config.settings import ProxySettings
from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    DONE,
    QUICK,
    Behaviour,
    Call,
    Cluster,
    FakeStage,
    answer,
    breaks,
    cluster,
    hangs,
    once,
    opening,
    refuses,
    replies,
    settings,
    streams,
    text_body,
)
from tests.proxy.generate.streams import Form

CHAT = Endpoint.CHAT.value
BODY = text_body(stream=True, max_tokens=8)
FORM = Form(chat=True, ids=True)
TOKENS = [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


def said(*tokens: tuple[int, str]) -> list[bytes]:
    return [opening(0), *(FORM.event([token]) for token in tokens)]


def whole(finish: str = "stop") -> Behaviour:
    """A stage that is told what was given begins with it, all at once."""
    return streams(FORM.stream(TOKENS, finish=finish))


@asynccontextmanager
async def fused(*ids: str, config: ProxySettings | None = None) -> AsyncIterator[Cluster]:
    """Stages of the same flags that answer with all of `TOKENS`."""
    async with cluster(*(ids or ("PD0", "PD1")), config=config) as c:
        for name, instance in c.instances.items():
            c.instances[name] = replace(instance, answer_flags=())
            c.table.apply(c.instances[name])
            c[name].usual = replies(200, {"kv_transfer_params": {"ok": True}}) if name.startswith("P") else whole()
            if name.startswith("PD"):
                c[name].usual = whole()
        yield c


def in_turn(c: Cluster, *turns: Behaviour, of: Sequence[str] = ("PD0", "PD1")) -> list[Call]:
    """Whoever of these stages is asked next does as the next of `turns` says. Returns the calls, as they come."""
    left, calls = list(turns), list[Call]()

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        calls.append(call)
        await left.pop(0)(stage, call, receive, send)

    for name in of:
        c[name].usual = behave
    return calls


async def text_of(c: Cluster, body: dict[str, Any] = BODY) -> str:
    response = await c.client.post(CHAT, json=body)
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n"), response.text
    assert response.text.count('"role"') == 1
    return text(response.text)


def text(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices"))


def params(call: Call) -> dict[str, Any]:
    return dict(call.body.get("kv_transfer_params") or {})


async def test_another_stage_is_told_what_was_given_and_the_client_is_told_nothing_twice() -> None:
    async with fused() as c:
        calls = in_turn(c, streams(*said(*TOKENS[:2]), then="break"), whole())
        response = await c.client.post(CHAT, json=BODY)
        assert text(response.text) == "abcd" and 'token_ids":[' not in response.text
        assert response.text.endswith(": x-epd-migrations: 1\n\ndata: [DONE]\n\n")
        first, second = calls
        assert first.body["return_token_ids"] is True and "kv_transfer_params" not in first.body
        assert second.body == {**first.body, "kv_transfer_params": {"goes_on_after": [1, 2]}}
        assert first.headers["x-request-id"] == second.headers["x-request-id"]
        assert c.metric("epd_proxy_migrations_total", way="fast", outcome="went_on") == 1
        await c.idle()


async def test_a_death_before_an_answer_is_not_counted_with_one_after_it() -> None:
    async with fused("PD0", "PD1", "PD2") as c:
        turns = breaks, streams(*said(*TOKENS[:2]), then="break"), breaks, whole()
        calls = in_turn(c, *turns, of=("PD0", "PD1", "PD2"))
        assert await text_of(c) == "abcd"
        assert [params(call).get("goes_on_after") for call in calls] == [None, None, [1, 2], [1, 2]]
        await c.idle()


@pytest.mark.parametrize("replay", [True, False])
async def test_a_pair_goes_on_as_the_way_wants_it(replay: bool) -> None:
    config = settings(first_token="decode", go_on="replay" if replay else "auto")
    async with fused("P0", "D0", "D1", config=config) as c:
        in_turn(c, streams(*said(*TOKENS[:2]), then="break"), whole(), of=("D0", "D1"))
        assert await text_of(c) == "abcd"
        again = params(c["P0"].calls[1]), params((c["D0"].calls + c["D1"].calls)[1])
        assert c["P0"].calls[0].body["max_tokens"] == c["P0"].calls[1].body["max_tokens"] == 1
        given = [one.get("goes_on_after") for one in again]
        calls = [call for name in ("D0", "D1") for call in c[name].calls if "goes_on_after" in params(call)]
        assert len(calls) == 1 and params(calls[0])["goes_on_after"] == [1, 2]
        assert params(calls[0]).get("replay", False) is replay
        assert given[0] == (None if replay else [1, 2]), "P prefills what D does not sample again"


async def test_no_setting_no_ids() -> None:
    async with fused(config=settings(go_on="never")) as c:
        in_turn(c, streams(*said(TOKENS[0]), then="break"), whole())
        assert text((await c.aborted_stream(BODY)).decode()) == "a"
        assert "return_token_ids" not in [*c["PD0"].calls, *c["PD1"].calls][0].body


async def test_stages_whose_flags_nobody_knows_or_that_differ_do_not_go_on() -> None:
    async with fused() as c:
        for flags in (None, ("--seed 1",)):
            c.table.apply(replace(c.instances["PD0"], answer_flags=()))
            c.table.apply(replace(c.instances["PD1"], answer_flags=flags))
            c.table.mark_down("PD1", "later")
            begun, release = asyncio.Event(), asyncio.Event()

            async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
                await streams(*said(TOKENS[0]), then="hold")(stage, call, receive, send)
                await release.wait()  # noqa: B023 - of this turn

            c["PD0"].usual = behave
            task = asyncio.create_task(c.aborted_stream(BODY, begun=begun))
            await begun.wait()
            c.table.mark_up("PD1")
            c.table.mark_down("PD0", "killed")
            release.set()
            received = await task
            assert received.count(b'"error"') == 1 and b"no_instance" in received
            c.table.mark_up("PD0")
        assert not c["PD1"].calls


async def test_an_answer_moves_as_often_as_it_may() -> None:
    one_by_one = [streams(*said(*TOKENS[:number]), then="break") for number in (1, 2, 3, 4)]
    async with fused(config=settings(migration=MigrationLimits(per_request=3))) as c:
        in_turn(c, *one_by_one[:3], whole())
        assert await text_of(c) == "abcd"
    async with fused(config=settings(migration=MigrationLimits(per_request=2))) as c:
        in_turn(c, *one_by_one, whole())
        received = await c.aborted_stream(BODY)
        assert text(received.decode()) == "abc" and received.count(b'"error"') == 1
        assert c.metric("epd_proxy_migrations_total", way="fast", outcome="failed") == 1
        await c.idle()


async def test_moving_costs_no_retry_and_makes_no_suspect() -> None:
    config = settings(retries=0, retry=RetryLimits(ratio=0, floor_per_s=0, burst=1))
    async with fused(config=config) as c:
        in_turn(c, *(streams(*said(*TOKENS[:number]), then="break") for number in (1, 2, 3)), whole())
        assert await text_of(c) == "abcd"
        assert c.metric("epd_proxy_deaths_total", stage="PD0") == c.metric("epd_proxy_deaths_total", stage="PD1") == 0
        assert c.metric("epd_proxy_retry_budget") == 1


async def test_a_stage_that_gives_nothing_new_is_a_failure_as_before_the_first_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.stages.poison.TOGETHER_S", 0.0)
    async with fused("PD0", "PD1", "PD2") as c:
        turns = [streams(*said(*TOKENS[:2]), then="break"), breaks, breaks, breaks]
        in_turn(c, *turns, of=("PD0", "PD1", "PD2"))
        received = await c.aborted_stream(BODY)
        assert text(received.decode()) == "ab" and received.count(b'"error"') == 1
        calls = sum(len(c[name].calls) for name in c.stages)
        assert calls == 3, "two instances that die in vain are enough"


@pytest.mark.parametrize(
    "end",
    [
        [b'data: {"error": {"code": 500}}\n\n', DONE],
        [FORM.event([(9, "zz")], "abort"), DONE],
        [],
    ],
    ids=["error", "abort", "end"],
)
async def test_whatever_ends_a_stream_early_is_followed_by_another(end: list[bytes]) -> None:
    async with fused() as c:
        in_turn(c, streams(*said(*TOKENS[:2]), *end), whole())
        assert await text_of(c) == "abcd"


async def test_an_answer_of_nothing_is_none() -> None:
    async with fused() as c:
        usage = FORM.written(choices=[], usage={"completion_tokens": 0})
        in_turn(c, streams(opening(0), usage, DONE), whole())
        assert await text_of(c) == "abcd"


@pytest.mark.parametrize("asks", [True, False])
async def test_what_lacks_but_its_end_needs_nobody_unless_its_usage_is_wanted(asks: bool) -> None:
    body = {**BODY, "stream_options": {"include_usage": True}} if asks else BODY
    usage = FORM.written(choices=[], usage={"completion_tokens": 4})
    events = [*said(*TOKENS[:3]), FORM.event(TOKENS[3:], "stop")]
    async with fused() as c:
        calls = in_turn(c, streams(*events, then="break"), streams(*events, usage, DONE))
        response = await c.client.post(CHAT, json=body)
        assert text(response.text) == "abcd" and response.text.count('"stop"') == 1
        assert response.text.count('"completion_tokens"') == asks and len(calls) == 1 + asks
        if asks:
            assert params(calls[1]) == {"goes_on_after": [1, 2, 3, 4], "replay": True}


async def test_another_prompt_is_not_gone_on_after() -> None:
    def opened(ids: str) -> bytes:
        return opening(0).replace(b'"choices"', b'"prompt_token_ids":[%s],"choices"' % ids.encode())

    async with fused(config=settings(retries=0)) as c:
        rest = FORM.stream(TOKENS).removeprefix(opening(0))
        first = [opened("1,2"), *said(TOKENS[0])[1:]]
        in_turn(c, streams(*first, then="break"), streams(opened("1,3") + rest))
        received = await c.aborted_stream(BODY)
        assert text(received.decode()) == "a" and b"another prompt" in received and b"[1,2]" not in received
    async with fused() as c:
        in_turn(c, streams(*first, then="break"), streams(opened("1,2") + rest))
        assert await text_of(c) == "abcd"


async def test_decode_that_another_one_waits_for_is_told_as_a_retry_after_its_refusal() -> None:
    async with fused(config=settings(retries=1)) as c:
        in_turn(c, streams(*said(*TOKENS[:2]), then="break"), refuses(500, "boom"), whole())
        assert await text_of(c) == "abcd"
        assert c.metric("epd_proxy_migration_gap_seconds_count") == 1


async def test_prefill_that_fails_after_decodes_first_token_costs_nothing() -> None:
    async with fused("P0", "D0", config=settings(first_token="decode")) as c:
        answered, failed = asyncio.Event(), asyncio.Event()

        async def decode(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
            await streams(*said(*TOKENS[:2]), then="hold")(stage, call, receive, send)
            answered.set()
            await failed.wait()
            for event in (FORM.event(TOKENS[2:], "stop"), DONE):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        c["D0"].usual = decode
        c["P0"].usual = once(answered, breaks)
        task = asyncio.create_task(text_of(c))
        await c["P0"].until(lambda stage: stage.calls != [] and stage.active == 0)
        failed.set()
        assert await task == "abcd" and len(c["D0"].calls) == 1


async def test_a_stage_that_falls_silent_under_a_stream_is_left() -> None:
    config = settings(timeouts=replace(QUICK, stage_silence_s=0.3))
    async with fused(config=config) as c:
        begun = asyncio.Event()
        calls = in_turn(c, streams(*said(*TOKENS[:2]), then="hang"), whole())
        received = b""

        async def ask() -> None:
            nonlocal received
            async with c.client.stream("POST", CHAT, json=BODY) as response:
                async for part in response.aiter_bytes():
                    received += part
                    begun.set()

        def report(name: str, number: int) -> None:
            c.table.report(stage_report(name, c.instances[name].incarnation, number))

        task = asyncio.create_task(ask())
        await begun.wait()
        silent = "PD0" if c["PD0"].calls else "PD1"
        other = "PD1" if silent == "PD0" else "PD0"
        report(silent, 1)
        number = 0
        while not task.done():
            number += 1
            report(other, number)
            await asyncio.wait([task], timeout=0.05)
        await task
        assert text(received.decode()) == "abcd" and len(calls) == 2
        assert c[silent].cancelled == 1
        await c.idle()


def stage_report(name: str, incarnation: str, seq: int) -> StageReport:
    return StageReport(instance=name, incarnation=incarnation, seq=seq)  # type: ignore[call-arg]


async def test_what_ids_nobody_tells_ends_with_its_stage_and_the_record_says_why() -> None:
    async with fused() as c:
        hidden = Form(chat=True)
        in_turn(c, streams(opening(0), hidden.event([TOKENS[0]]), then="break"), whole())
        received = await c.aborted_stream(BODY)
        assert text(received.decode()) == "a" and received.count(b'"error"') == 1
        assert c.metric("epd_proxy_migrations_total", way="none", outcome="failed") == 1


@pytest.mark.parametrize("body", [{**BODY, "n": 2}, {**BODY, "include_reasoning": False}], ids=["n", "hidden"])
async def test_what_cannot_go_on_is_asked_for_as_ever(body: dict[str, Any]) -> None:
    async with fused() as c:
        calls = in_turn(c, streams(*said(TOKENS[0]), then="break"), whole())
        received = await c.aborted_stream(body)
        assert received.count(b'"error"') == 1 and len(calls) == 1
        assert "return_token_ids" not in calls[0].body


async def test_nothing_goes_on_after_an_answer_in_one_piece_so_no_ids_are_asked_for() -> None:
    async with fused("PD0") as c:
        c["PD0"].usual = answer
        response = await c.client.post(CHAT, json=text_body(max_tokens=8))
        assert response.status_code == 200
        (call,) = c["PD0"].calls
        assert "return_token_ids" not in call.body


async def test_a_client_that_leaves_between_two_stages_leaves_no_trace() -> None:
    config = settings(migration=MigrationLimits(per_s=0.001, burst=1))
    async with fused(config=config) as c:
        in_turn(c, streams(*said(TOKENS[0]), then="break"), whole())
        await text_of(c)
        in_turn(c, streams(*said(TOKENS[0]), then="break"), hangs)
        async with c.client.stream("POST", CHAT, json=BODY) as response:
            async for line in response.aiter_lines():
                if '"a"' in line:
                    break
        await c.idle()
        assert c.pipeline._generate._history_room.held_bytes == 0
