"""How P and D are given the media: metadata where it suffices, and what follows when a feature got lost."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from epd_serve.wire import ALL_MISSING, ENCODE_AGAIN_XARG, MISSING_XARG, ON_MISSING_XARG, PROMPT_XARG, FeatureMissing
from proxy.registry.announcements import AnnouncementDispatcher
from proxy.registry.instance_state import Work
from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    GRID,
    Behaviour,
    Call,
    Cluster,
    breaks,
    cluster,
    data_url,
    encodes,
    hangs,
    image_body,
    image_file,
    parts,
    refused_instance,
    refuses,
    replies,
    settings,
    text_body,
)

CHAT = Endpoint.CHAT.value
REENCODE = settings(on_missing_feature="reencode")
TRUSTING = settings(trust_request_mm_kwargs=True)


def kind(call: Call) -> str:
    """`metadata` or `pixels`, all parts alike; with `!` where a lost feature fails the request."""
    [found] = {"metadata" if part["type"].endswith("_embeds") else "pixels" for part in parts(call)}
    return found + "!" * (xargs(call).get(ON_MISSING_XARG) == "fail")


def xargs(call: Call) -> dict[str, str]:
    """But for what tells one prompt from another, which all have whose media goes under its own name."""
    return {name: word for name, word in (call.body.get("vllm_xargs") or {}).items() if name != PROMPT_XARG}


def kinds(c: Cluster, name: str) -> list[str]:
    return [kind(call) for call in c[name].calls]


def loses(c: Cluster, cause: str = "evicted", *, keys: list[str] | None = None) -> Behaviour:
    """A consumer that says what it lacks, and fails the request."""

    async def behave(stage: Any, call: Call, receive: Any, send: Any) -> None:
        lost = keys if keys is not None else [part["uuid"] for part in parts(call)]
        request_id = f"{call.headers['x-request-id']}-1a2b3c4d"
        c.pipeline.dispatcher.dispatch(FeatureMissing(request_id, lost, cause))
        await refuses(500, "Internal server error")(stage, call, receive, send)

    return behave


async def test_p_and_d_get_grid_and_key_instead_of_the_image() -> None:
    async with cluster("E0", "P0", "D0", config=settings(xargs=("theirs",))) as c:
        c["E0"].usual = encodes()
        assert (await c.ask(vllm_xargs={"theirs": 1})).status_code == 200
        await c.idle()
        [[key]] = c["E0"].keys
        for name in ("P0", "D0"):
            [call] = c[name].calls
            text, item = call.body["messages"][0]["content"]
            assert text["type"] == "text"
            assert item == {"type": "image_embeds", "image_embeds": GRID, "uuid": key}
            assert xargs(call) == {"theirs": 1, ON_MISSING_XARG: "fail"}
        assert kinds(c, "E0") == ["pixels"] and ENCODE_AGAIN_XARG not in xargs(c["E0"].calls[0])
        assert c.metric("epd_proxy_deliveries_total", delivery="metadata") == 1


async def test_other_modalities_have_their_own_fields() -> None:
    audio = {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}
    film = {"url": "data:video/mp4;base64,AAAA"}
    content = [{"type": "input_audio", "input_audio": audio}, {"type": "video_url", "video_url": film}]
    async with cluster("E0", "PD0") as c:
        c["E0"].usual = encodes(num=[3])
        response = await c.client.post(CHAT, json=text_body(messages=[{"role": "user", "content": content}]))
        assert response.status_code == 200
        first, second = parts(c["PD0"].calls[0])
        assert first["type"] == "audio_embeds" and first["audio_embeds"] == {"num": [3]}
        assert second["type"] == "video_embeds" and second["video_embeds"] == {"num": [3]}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (settings(send_pixels="always"), {}),
        (TRUSTING, {"mm_processor_kwargs": {"max_pixels": 100}}),
        (TRUSTING, {"media_io_kwargs": {"image": {}}}),
    ],
)
async def test_pixels_are_sent_where_asked_for_or_where_the_options_matter(config: Any, more: dict[str, Any]) -> None:
    async with cluster("E0", "P0", "D0", config=config) as c:
        c["E0"].usual = encodes()
        assert (await c.ask(**more)).status_code == 200
        await c.idle()
        assert kinds(c, "P0") == kinds(c, "D0") == ["pixels"]


async def test_one_item_without_metadata_is_reason_enough_for_pixels_of_all() -> None:
    urls = [data_url(image_file(color=color)) for color in ("red", "blue")]
    async with cluster("E0", "PD0") as c:
        c["E0"].script.append(encodes())
        assert (await c.ask(urls[0])).status_code == 200
        assert (await c.ask(*urls)).status_code == 200
        assert kinds(c, "PD0") == ["metadata!", "pixels!"]


async def test_items_whose_fields_differ_are_not_mixed() -> None:
    urls = [data_url(image_file(color=color)) for color in ("red", "blue")]
    async with cluster("E0", "PD0") as c:
        c["E0"].script.extend([encodes(), encodes(other=[1])])
        for url in urls:
            assert (await c.ask(url)).status_code == 200
        assert (await c.ask(*urls)).status_code == 200
        assert kinds(c, "PD0") == ["metadata!", "metadata!", "pixels!"]


async def test_unencoded_items_mean_pixels_that_p_does_not_wait_for() -> None:
    async with cluster("E0", "PD0") as c:
        c["E0"].script.append(breaks)
        assert (await c.ask()).status_code == 200
        [call] = c["PD0"].calls
        assert kind(call) == "pixels" and xargs(call) == {MISSING_XARG: parts(call)[0]["uuid"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_feature_is_followed_by_pixels_under_a_new_transfer_once_d_is_cancelled(stream: bool) -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        c["P0"].script.append(loses(c))
        c["D0"].script.append(hangs)
        assert (await c.ask(stream=stream)).status_code == 200
        await c.idle()
        assert kinds(c, "P0") == kinds(c, "D0") == ["metadata!", "pixels"] and c["D0"].cancelled == 1
        first, second = (call.body["kv_transfer_params"]["transfer_id"] for call in c["D0"].calls)
        assert first != second
        [named], [again] = c["P0"].keys
        assert named != again == xargs(c["P0"].calls[1])[MISSING_XARG], "nothing to wait for under that name"
        assert c.metric("epd_proxy_step_downs_total", failed="metadata", next="pixels", cause="evicted") == 1
        assert c.metric("epd_proxy_retries_total", stage="P0") == 0
        assert (await c.ask()).status_code == 200
        assert len(c["E0"].calls) == 2, "what got lost is encoded for the next request"


async def test_stepping_down_does_not_use_up_a_retry_and_happens_once() -> None:
    async with cluster("E0", "PD0", config=settings(retries=1)) as c:
        c["E0"].usual = encodes()
        c["PD0"].script.extend([loses(c), breaks])
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["metadata!", "pixels", "pixels"]
        c["PD0"].script.extend([loses(c), breaks, breaks])
        assert (await c.ask()).status_code == 502


async def test_a_failure_nobody_explains_is_also_followed_by_pixels_and_the_instance_avoided() -> None:
    async with cluster("E0", "PD0", "PD1") as c:
        c["E0"].usual = encodes()
        c["PD0"].script.append(breaks)
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["metadata!"] and kinds(c, "PD1") == ["pixels"]


async def test_a_proxy_that_hears_its_stages_first_believes_that_the_stage_was_ill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AnnouncementDispatcher, "listening", property(lambda _: True))
    async with cluster("E0", "PD0", "PD1") as c:
        c["E0"].usual = encodes()
        c["PD0"].script.append(breaks)
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["metadata!"] == kinds(c, "PD1"), "its feature is not computed again elsewhere"
        c["PD0"].usual = c["PD1"].usual = refuses(500, "Internal server error")
        assert (await c.ask()).status_code == 502
        assert [*kinds(c, "PD0"), *kinds(c, "PD1")].count("pixels") >= 1, "but not for ever"


async def test_a_request_with_processor_options_that_nobody_encoded_waits_for_none_of_its_items() -> None:
    async with cluster("E0", "PD0", config=TRUSTING) as c:
        c["E0"].usual = breaks
        assert (await c.ask(mm_processor_kwargs={"max_pixels": 100})).status_code == 200
        assert xargs(c["PD0"].calls[0]) == {MISSING_XARG: ALL_MISSING}, "vLLM's name for the item is not ours"


async def test_a_stage_that_cannot_be_reached_says_nothing_about_features() -> None:
    async with cluster("E0", "PD1") as c:
        c["E0"].usual = encodes()
        c.table.apply(refused_instance("PD0", c["PD1"].role))
        c.table.acquire("PD1", Work.PREFILL)
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD1") == ["metadata!"]


async def test_refused_metadata_is_judged_again_with_the_media_and_not_trusted_any_more() -> None:
    async with cluster("E0", "PD0") as c:
        c["E0"].usual = encodes()
        c["PD0"].script.append(refuses(400, "Metadata image_grid_thw must be a finite numeric array."))
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["metadata!", "pixels"]
        c["PD0"].script.append(refuses(400, "context overflow", "messages"))
        refused = await c.ask()
        assert refused.status_code == 400 and refused.json()["error"]["message"] == "context overflow"
        assert kinds(c, "PD0")[2:] == ["pixels!"]


async def test_where_metadata_travels_media_that_may_be_recomputed_never_has_a_features_name() -> None:
    """vLLM would take it for the item that it was sent without its media (`proxy/generate/recovery.py`)."""
    urls = [data_url(image_file(color=color)) for color in ("red", "blue")]
    for config in (settings(), REENCODE):
        async with cluster("E0", "PD0", config=config) as c:
            c["E0"].script.extend([encodes(), encodes(), breaks])
            c["E0"].usual = encodes(other=[1])
            for lost in range(3):
                c["PD0"].script.extend([loses(c)] * lost)
                await c.ask(urls[0])
                await c.ask(*urls)
            features = {key for keys in c["E0"].keys for key in keys}
            for call, keys in zip(c["PD0"].calls, c["PD0"].keys, strict=True):
                named = features & set(keys)
                assert named == set() if kind(call) == "pixels" else named == set(keys)
            assert "pixels" in kinds(c, "PD0")


async def test_what_is_surely_recomputed_has_no_features_name_though_this_proxy_has_seen_no_metadata() -> None:
    """Another run of the proxy may have sent the item without its media, which the stage then remembers."""
    async with cluster("E0", "PD0") as c:
        c["E0"].usual = refuses(500, "boom")
        assert (await c.ask()).status_code == 200
        [[key]], [[name]] = {tuple(keys) for keys in c["E0"].keys}, c["PD0"].keys
        assert name != key and xargs(c["PD0"].calls[0]) == {MISSING_XARG: name}


async def test_where_no_encoder_gives_metadata_media_keeps_the_features_name_and_may_be_recomputed() -> None:
    async with cluster("E0", "PD0") as c:
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["pixels"] and c["PD0"].keys == c["E0"].keys


async def test_with_reencode_the_lost_feature_is_encoded_elsewhere_and_metadata_sent_once_more() -> None:
    async with cluster("E0", "E1", "P0", "D0", config=REENCODE) as c:
        c["E0"].usual = c["E1"].usual = encodes()
        c["P0"].script.append(loses(c))
        c["D0"].script.append(hangs)
        assert (await c.ask()).status_code == 200
        await c.idle()
        assert kinds(c, "P0") == ["metadata!", "metadata!"]
        assert len(c["E0"].calls) == len(c["E1"].calls) == 1
        [again] = [call for name in ("E0", "E1") for call in c[name].calls if xargs(call)]
        assert xargs(again) == {ENCODE_AGAIN_XARG: c["E0"].keys[0][0]}
        assert c.metric("epd_proxy_step_downs_total", failed="metadata", next="metadata", cause="evicted") == 1
        assert c.metric("epd_proxy_encoded_again_total") == 1


async def test_with_reencode_a_feature_lost_twice_is_recomputed() -> None:
    async with cluster("E0", "PD0", config=REENCODE) as c:
        c["E0"].usual = encodes()
        c["PD0"].script.extend([loses(c), loses(c, "corrupt")])
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["metadata!", "metadata!", "pixels"] and len(c["E0"].calls) == 2
        assert c.metric("epd_proxy_step_downs_total", failed="metadata", next="pixels", cause="corrupt") == 1


async def test_with_reencode_but_no_encoder_left_it_is_recomputed() -> None:
    async with cluster("E0", "PD0", config=REENCODE) as c:
        c["E0"].script.append(encodes())
        c["E0"].usual = breaks
        c["PD0"].script.append(loses(c))
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["metadata!", "pixels"]
        assert MISSING_XARG in xargs(c["PD0"].calls[1])


async def test_with_reencode_requests_that_carry_pixels_are_encoded_again_before_they_may_recompute() -> None:
    async with cluster("E0", "PD0", config=replace(REENCODE, send_pixels="always")) as c:
        c["E0"].usual = encodes()
        c["PD0"].script.append(loses(c))
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["pixels!", "pixels"] and len(c["E0"].calls) == 2
        assert xargs(c["PD0"].calls[1]) == {}


async def test_a_lost_feature_that_only_stages_can_name_is_encoded_again_all_the_same() -> None:
    """vLLM renames an item when the request has processor options."""
    trusting = replace(REENCODE, trust_request_mm_kwargs=True)
    async with cluster("E0", "PD0", config=trusting) as c:
        c["E0"].usual = encodes()
        c["PD0"].script.append(loses(c, keys=["renamed"]))
        assert (await c.ask(mm_processor_kwargs={"max_pixels": 100})).status_code == 200
        assert kinds(c, "PD0") == ["pixels!", "pixels"]
        assert "renamed" in xargs(c["E0"].calls[1])[ENCODE_AGAIN_XARG].split(",")


async def test_many_requests_that_lost_one_feature_have_it_encoded_again_together() -> None:
    async with cluster("E0", "PD0", config=REENCODE) as c:
        c["E0"].usual = encodes()
        assert (await c.ask()).status_code == 200
        c["PD0"].script.extend([loses(c)] * 8)
        assert {answer.status_code for answer in await asyncio.gather(*(c.ask() for _ in range(8)))} == {200}
        assert len(c["E0"].calls) < 8 and len(c.pipeline._encode.flights) == 0


async def test_an_instance_that_encodes_for_itself_always_gets_the_media() -> None:
    async with cluster("E0", "PD0", "EP0", "D0") as c:
        c["E0"].usual = encodes()
        for _ in range(4):  # one by one: of requests that come together, all may choose the same way
            assert (await c.ask()).status_code == 200
            await c.idle()
        assert set(kinds(c, "EP0")) == {"pixels"} and set(kinds(c, "PD0")) == {"metadata!"}


async def test_undelivered_kv_and_metadata() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        c["P0"].script.append(replies(200, {"kv_transfer_params": {"ok": False, "reason": "x"}}))
        c["D0"].script.append(hangs)
        assert (await c.ask()).status_code == 200
        await c.idle()
        assert kinds(c, "P0") == ["metadata!", "pixels"]


@pytest.mark.parametrize("name", ["epd_on_missing", "epd_missing", "epd_encode_again"])
async def test_our_own_words_are_not_accepted_from_clients(name: str) -> None:
    async with cluster("E0", "PD0") as c:
        response = await c.client.post(CHAT, json=image_body(vllm_xargs={name: "fail"}))
        assert response.status_code == 400 and response.json()["error"]["param"] == f"vllm_xargs.{name}"
        assert not any(stage.calls for stage in c.stages.values())
