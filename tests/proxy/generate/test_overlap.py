"""P and D are called while encoders work: when, with what, and what becomes of it when the encoding goes wrong."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Receive, Send

from epd_serve.wire import FeatureExpected, FeatureMissing, FeatureReady, StoreReport
from proxy.config.limits import AdmissionLimits
from proxy.stages.poison import WatchedBody
from tests.proxy.fakes import (
    GRID,
    Behaviour,
    Call,
    Cluster,
    FakeStage,
    answer,
    cluster,
    data_url,
    encodes,
    hangs,
    image_file,
    once,
    parts,
    refuses,
    replies,
    settings,
)

AHEAD = "epd_proxy_went_ahead_total"


def coloured(*colors: str) -> list[str]:
    return [data_url(image_file(color=color)) for color in colors]


def expect(c: Cluster, *keys: str) -> None:
    """E's worker begins with these."""
    c.pipeline.dispatcher.dispatch(FeatureExpected(dict.fromkeys(keys, GRID), "E0-life1"))


def announcing(c: Cluster, then: Behaviour) -> Behaviour:
    """An encoder that says what it expects when it begins, and goes on as `then`."""

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        expect(c, *[part["uuid"] for part in parts(call)])
        await then(stage, call, receive, send)

    return behave


def bodies(stage: FakeStage) -> list[str]:
    """What stands for the media, call by call."""
    return ["metadata" if any("image_embeds" in str(part) for part in parts(call)) else "media" for call in stage.calls]


async def asked_one_after_the_other(c: Cluster, **body: Any) -> None:
    """P is not called before the encoder has answered."""
    released = asyncio.Event()
    c["E0"].usual = announcing(c, once(released, encodes()))
    answered = asyncio.create_task(c.ask(**body))
    await c["E0"].until(lambda stage: stage.active == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not c["P0"].calls
    released.set()
    assert (await answered).status_code == 200


async def until_called(c: Cluster, *names: str, calls: int = 1) -> None:
    for name in names:
        await c[name].until(lambda stage: len(stage.calls) == calls and stage.active == 1)


@pytest.mark.parametrize("layout", [("P0", "D0"), ("PD0",)])
async def test_prefill_and_decode_get_the_metadata_while_the_encoder_works(layout: tuple[str, ...]) -> None:
    async with cluster("E0", *layout) as c:
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, encodes()))
        answered = asyncio.create_task(c.ask(headers={"x-epd-explain": "1"}))
        await c["E0"].until(lambda stage: stage.active == 1)
        for name in layout:
            await c[name].until(lambda stage: len(stage.calls) == 1)
            assert bodies(c[name]) == ["metadata"]
        released.set()
        response = await answered
        assert response.status_code == 200
        names = [stamp.partition("=")[0] for stamp in response.headers["x-epd-timing-ms"].split(", ")]
        assert "dispatched" in names and ("encoded" not in names or names.index("dispatched") < names.index("encoded"))
        assert c.metric(AHEAD, outcome="answered") == 1
        await c.idle()
        assert c.pipeline.gate.queue.encoding == 0


async def test_all_items_have_to_be_known_and_one_that_is_stored_is() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].usual = once(released, encodes())
        answered = asyncio.create_task(c.ask(*coloured("red", "blue")))
        await c["E0"].until(lambda stage: stage.active == 1)
        [first, second] = c["E0"].keys[0]
        expect(c, first)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not c["P0"].calls and not c["D0"].calls
        c.pipeline.dispatcher.dispatch(FeatureReady(second, 100, "E0-life1", pooled=True, metadata=GRID))
        await c["P0"].until(lambda stage: len(stage.calls) == 1)
        released.set()
        assert (await answered).status_code == 200


@pytest.mark.parametrize("cores", [{"E0": (0,), "P0": (0,), "D0": (1,)}, {"E0": (0,), "P0": (1,), "D0": (0,)}])
async def test_on_cores_that_the_tower_shares_only_prefill_prepares_before_it_has_ended(
    cores: dict[str, tuple[int]],
) -> None:
    async with cluster("E0", "P0", "D0") as c:
        for name, own in cores.items():
            c.table.apply(replace(c.instances[name], cpu_cores=own))
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, encodes()))
        answered = asyncio.create_task(c.ask())
        await c["E0"].until(lambda stage: stage.active == 1)
        [[key]] = c["E0"].keys
        await c["P0"].until(lambda stage: len(stage.calls) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not c["D0"].calls
        c.pipeline.dispatcher.dispatch(FeatureReady(key, 100, "E0-life1", pooled=True, metadata=GRID))
        await c["D0"].until(lambda stage: len(stage.calls) == 1)
        released.set()
        assert (await answered).status_code == 200 and c.metric(AHEAD, outcome="answered") == 1


async def test_what_need_not_be_encoded_goes_straight_and_ahead_of_nothing() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        for _ in range(2):
            assert (await c.ask()).status_code == 200
        assert len(c["E0"].calls) == 1 and bodies(c["P0"]) == ["metadata"] * 2
        assert not sum(c.metric(AHEAD, outcome=outcome) for outcome in ("answered", "cut", "failed"))


@pytest.mark.parametrize(
    ("changes", "body"),
    [
        ({"overlap": "never"}, {}),
        ({"send_pixels": "always"}, {}),
        ({"trust_request_mm_kwargs": True}, {"mm_processor_kwargs": {"max_pixels": 100}}),
    ],
)
async def test_nothing_goes_ahead_where_that_is_off_or_media_has_to_travel(
    changes: dict[str, Any], body: dict[str, Any]
) -> None:
    async with cluster("E0", "P0", "D0", config=settings(**changes)) as c:
        await asked_one_after_the_other(c, **body)


async def test_an_encoders_refusal_ends_what_went_ahead_and_is_the_clients_error() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, refuses(400, "bad image")))
        c["P0"].usual = c["D0"].usual = hangs
        answered = asyncio.create_task(c.ask())
        await until_called(c, "P0", "D0")
        released.set()
        response = await answered
        assert response.status_code == 400 and response.json()["error"]["message"] == "bad image"
        await c.idle()
        assert c["P0"].cancelled == c["D0"].cancelled == 1 and c.metric(AHEAD, outcome="cut") == 1


async def test_an_item_that_is_given_up_is_sent_with_its_media_then() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, refuses(500, "boom")))
        c["P0"].script.append(hangs)
        c["D0"].script.append(hangs)
        answered = asyncio.create_task(c.ask())
        await until_called(c, "P0", "D0")
        released.set()
        assert (await answered).status_code == 200
        assert bodies(c["P0"]) == bodies(c["D0"]) == ["metadata", "media"]
        assert c.metric(AHEAD, outcome="cut") == 1 and c.metric("epd_proxy_retries_total", instance="P0") == 0


async def test_an_encoder_that_dies_is_replaced_while_prefill_and_decode_wait() -> None:
    async with cluster("E0", "E1", "P0", "D0") as c:
        died = asyncio.Event()
        released = asyncio.Event()
        for name in ("E0", "E1"):
            c[name].script.append(announcing(c, once(died, refuses(500, "boom"))))
            c[name].usual = announcing(c, once(released, encodes()))
        c["P0"].usual = once(released, answer)
        c["D0"].usual = once(released, answer)
        answered = asyncio.create_task(c.ask())
        await until_called(c, "P0", "D0")
        [first] = [name for name in ("E0", "E1") if c[name].calls]
        other = c["E1" if first == "E0" else "E0"]
        other.script.clear()
        died.set()
        await other.until(lambda stage: stage.active == 1)
        assert c["P0"].active == c["D0"].active == 1, "they go on waiting"
        released.set()
        assert (await answered).status_code == 200
        assert len(c["P0"].calls) == 1 and c.metric(AHEAD, outcome="answered") == 1


async def test_a_client_that_leaves_cancels_all_three() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = announcing(c, hangs)
        c["P0"].usual = c["D0"].usual = hangs
        request = asyncio.create_task(c.ask())
        await until_called(c, "P0", "D0")
        request.cancel()
        await c.idle()
        assert c["E0"].cancelled == c["P0"].cancelled == c["D0"].cancelled == 1
        assert c.pipeline.gate.queue.encoding == 0 and len(c.pipeline._encode.flights) == 0


async def test_an_attempt_that_fails_meanwhile_is_repeated_after_the_encoding() -> None:
    async with cluster("E0", "P0", "P1", "D0") as c:
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, encodes()))
        for name in ("P0", "P1"):
            c[name].script.append(replies(500, {}))
        c["D0"].script.append(hangs)
        answered = asyncio.create_task(c.ask())
        await c.until_metric(AHEAD, 1, outcome="failed")
        failed = next(name for name in ("P0", "P1") if c[name].calls)
        c["P1" if failed == "P0" else "P0"].script.clear()
        assert len(c["D0"].calls) == 1
        released.set()
        assert (await answered).status_code == 200
        assert len(c["D0"].calls) == 2 and len(c["E0"].calls) == 1


async def test_a_feature_that_was_missed_too_early_costs_no_step_down() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, encodes()))

        async def gives_up(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
            keys = [part["uuid"] for part in parts(call)]
            c.pipeline.dispatcher.dispatch(FeatureMissing(call.headers["x-request-id"], keys, "deadline"))
            await replies(500, {})(stage, call, receive, send)

        c["P0"].script.append(gives_up)
        c["D0"].script.append(hangs)
        answered = asyncio.create_task(c.ask())
        await c.until_metric(AHEAD, 1, outcome="failed")
        released.set()
        assert (await answered).status_code == 200
        assert bodies(c["P0"]) == ["metadata", "metadata"] and len(c["E0"].calls) == 1


async def test_who_waits_for_another_requests_encoding_goes_ahead_too_and_stands_back_when_it_is_handed_over() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].script.append(announcing(c, once(released, encodes())))
        c["E0"].usual = once(released, encodes())
        c["P0"].usual = c["D0"].usual = hangs
        leader, *followers = [asyncio.create_task(c.ask()) for _ in range(3)]
        await c["P0"].until(lambda stage: stage.active == 3)
        assert len(c["E0"].calls) == 1 and c.pipeline.gate.queue.encoding == 1
        leader.cancel()
        await c["E0"].until(lambda stage: len(stage.calls) == 2)
        await c["P0"].until(lambda stage: stage.cancelled == 3)
        assert c.metric(AHEAD, outcome="cut") == 2, "the one that encodes now, and the one that waits for that"
        c["P0"].usual = c["D0"].usual = answer
        released.set()
        assert [(await follower).status_code for follower in followers] == [200, 200]
        await c.idle()
        assert c.pipeline.gate.queue.encoding == 0


async def test_nothing_goes_ahead_while_a_store_is_full() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, encodes()))
        begun = asyncio.create_task(c.ask())
        await c["P0"].until(lambda stage: len(stage.calls) == 1)
        c.pipeline.dispatcher.dispatch(StoreReport("E0", "E0-life1", 100, 100, 0, waiting_puts=1))
        [[key]] = c["E0"].keys
        expect(c, key)
        follower = asyncio.create_task(c.ask())
        await c.until_metric("epd_proxy_encode_coalesced_total", 1)
        expect(c, key)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(c["P0"].calls) == 1, "only the one that was there before"
        released.set()
        assert (await begun).status_code == (await follower).status_code == 200


async def test_nobody_goes_ahead_of_those_who_wait_for_a_place() -> None:
    limits = AdmissionLimits(sequences_per_instance=1, encodes_per_instance=2)
    async with cluster("E0", "P0", "D0", config=settings(admission=limits)) as c:
        released = asyncio.Event()
        c["E0"].usual = announcing(c, once(released, encodes()))
        c["P0"].usual = c["D0"].usual = once(released, answer)
        first = asyncio.create_task(c.ask(*coloured("red")))
        await c["P0"].until(lambda stage: stage.active == 1)
        second = asyncio.create_task(c.ask(*coloured("blue")))
        await c["E0"].until(lambda stage: stage.active == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(c["P0"].calls) == 1 and c.pipeline.gate.queue.encoding == 2
        released.set()
        assert (await first).status_code == (await second).status_code == 200
        assert c.metric(AHEAD, outcome="answered") == 1


async def test_a_suspect_takes_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedBody, "suspected", True)
    async with cluster("E0", "P0", "D0") as c:
        await asked_one_after_the_other(c)


async def test_after_the_first_byte_what_becomes_of_the_encoding_is_of_no_interest() -> None:
    async with cluster("E0", "P0", "D0") as c:
        ends = asyncio.Event()
        c["E0"].usual = announcing(c, once(ends, refuses(400, "late")))
        body = {"stream": True}
        response = asyncio.create_task(c.ask(**body))
        await c.until_metric(AHEAD, 1, outcome="answered")
        ends.set()
        text = (await response).text
        assert text.endswith("[DONE]\n\n") and "error" not in json.dumps(text)
        await c.idle()
