"""One image over several encoders: when it is cut, what each is asked for, and what comes of a part that fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from epd_serve.image_tokens import Tiled
from epd_serve.wire import ENCODE_AGAIN_XARG, MISSING_XARG, PARTS_XARG, FeatureReady
from proxy.config.settings import ProxySettings
from proxy.registry.instance_state import Work
from proxy.routing.policy import parts_of
from proxy.stages.bodies import media_name
from store.keys import part_keys, whole_of
from tests.proxy.fakes import (
    Cluster,
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
from tests.proxy.generate.test_delivery import loses

SIDE = 8
TILING = settings(image_tokens=Tiled(SIDE, 256, 1, 6, thumbnail=True))
OPTIONS = {"mm_processor_kwargs": {"max_pixels": 100}}


def tiles(count: int, color: str = "red") -> str:
    """An image of so many tiles and a thumbnail."""
    return data_url(image_file(SIDE * count, SIDE, color))


def asked(c: Cluster) -> list[str]:
    """Keys that encoders were asked for, in order."""
    return sorted(key for name in c.stages if name.startswith("E") for keys in c[name].keys for key in keys)


def told(c: Cluster, name: str = "PD0") -> dict[str, str]:
    words: dict[str, str] = c[name].calls[-1].body.get("vllm_xargs") or {}
    return words


@pytest.fixture
def two() -> Any:
    return cluster("E0", "E1", "PD0", config=TILING)


def all_encode(c: Cluster) -> None:
    for name in c.stages:
        if name.startswith("E"):
            c[name].usual = encodes()


async def test_two_idle_encoders_get_half_an_image_each_and_prefill_hears_of_both(two: Any) -> None:
    async with two as c:
        all_encode(c)
        response = await c.ask(tiles(3), headers={"x-epd-explain": "1"})
        assert response.status_code == 200
        [key] = {whole_of(one) for one in asked(c)}
        assert asked(c) == sorted(part_keys(key, 2)) and len(c["E0"].calls) == len(c["E1"].calls) == 1
        assert "encode=E0+E1" in response.headers["x-epd-instances"].replace("E1+E0", "E0+E1")
        assert told(c)[PARTS_XARG] == ",".join(part_keys(key, 2)) and MISSING_XARG not in told(c)
        assert c.metric("epd_proxy_image_parts_total") == 2
        sent = [parts(c[name].calls[0])[0]["image_url"]["url"] for name in ("E0", "E1")]
        assert sent[0] == sent[1], "the whole image goes to both"
        assert (await c.ask(tiles(3))).status_code == 200
        assert len(asked(c)) == 2, "it is there, in parts"
        assert told(c)[PARTS_XARG] == ",".join(part_keys(key, 2))


async def test_prefill_hears_of_parts_whatever_encoders_say_in_their_answers(two: Any) -> None:
    async with two as c:  # whose encoders answer as those of vLLM 0.23
        assert (await c.ask(tiles(3))).status_code == 200
        assert told(c)[PARTS_XARG] == ",".join(part_keys(whole_of(asked(c)[0]), 2))


async def test_an_encoder_that_could_not_cut_has_made_the_whole(two: Any) -> None:
    async with two as c:

        async def uncut(stage: Any, call: Any, receive: Any, send: Any) -> None:
            [part] = call.body["messages"][0]["content"]
            key = whole_of(part["uuid"])
            c.pipeline.dispatcher.dispatch(FeatureReady(key, 100, f"{stage.id}-life1", pooled=True))
            entries = {key: {"item_indices": [0], "metadata": {}}}
            await replies(200, {"object": "x", "choices": [], "ec_transfer_params": entries})(
                stage, call, receive, send
            )

        c["E0"].usual = c["E1"].usual = uncut
        assert (await c.ask(tiles(3))).status_code == 200
        assert PARTS_XARG not in told(c) and MISSING_XARG not in told(c)


async def test_there_are_no_more_parts_than_tiles() -> None:
    async with cluster("E0", "E1", "E2", "E3", "PD0", config=TILING) as c:
        all_encode(c)
        await c.ask(tiles(2))  # and a thumbnail
        assert [whole_of(key) for key in asked(c)] == [whole_of(asked(c)[0])] * 3
        assert sorted(len(c[f"E{index}"].calls) for index in range(4)) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("ids", "config", "shown", "more"),
    [
        (("E0",), TILING, [tiles(3)], {}),
        (("E0", "E1"), settings(), [tiles(3)], {}),
        (("E0", "E1"), settings(image_tokens=TILING.image_tokens, image_parts=1), [tiles(3)], {}),
        (("E0", "E1"), TILING, [tiles(1)], {}),
        (("E0", "E1"), TILING, [tiles(3), tiles(3, "blue")], {}),
        (("E0", "E1"), settings(image_tokens=TILING.image_tokens, trust_request_mm_kwargs=True), [tiles(3)], OPTIONS),
    ],
    ids=[
        "one encoder",
        "rows run across tiles",
        "switched off",
        "one tile",
        "an image for each",
        "other names in vLLM",
    ],
)
async def test_an_image_stays_whole(
    ids: tuple[str, ...], config: ProxySettings, shown: list[str], more: dict[str, Any]
) -> None:
    async with cluster(*ids, "PD0", config=config) as c:
        all_encode(c)
        assert (await c.ask(*shown, **more)).status_code == 200
        assert len(asked(c)) == len(shown) and not any("/" in key for key in asked(c))
        assert PARTS_XARG not in told(c) and c.metric("epd_proxy_image_parts_total") == 0


async def test_an_encoder_that_is_busy_is_left_alone(two: Any) -> None:
    async with two as c:
        all_encode(c)
        with c.table.acquire("E0", Work.ENCODE, 512.0):
            await c.ask(tiles(3))
        assert not any("/" in key for key in asked(c))


async def test_encoders_on_one_device_do_not_share_an_image(two: Any) -> None:
    async with two as c:
        all_encode(c)
        for name in ("E0", "E1"):
            c.table.apply(replace(c.instances[name], devices=(0,)))
        await c.ask(tiles(3))
        assert not any("/" in key for key in asked(c))


async def test_a_part_that_fails_is_tried_elsewhere_and_the_other_stays(two: Any) -> None:
    async with two as c:
        all_encode(c)
        c["E0"].script.append(refuses(500, "boom"))
        assert (await c.ask(tiles(3))).status_code == 200
        [[lost]], taken = c["E0"].keys, [key for keys in c["E1"].keys for key in keys]
        assert sorted(taken) == sorted(part_keys(whole_of(lost), 2)), "the half that failed, and its own"
        assert told(c)[PARTS_XARG] == ",".join(part_keys(whole_of(lost), 2))
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_failed") == 0


async def test_an_image_that_lacks_a_part_is_the_prefilling_stages_to_encode(two: Any) -> None:
    async with two as c:

        async def all_but_the_second(stage: Any, call: Any, receive: Any, send: Any) -> None:
            bad = any(part["uuid"].endswith("/1-2") for part in call.body["messages"][0]["content"])
            await (refuses(500, "boom") if bad else encodes())(stage, call, receive, send)

        c["E0"].usual = c["E1"].usual = all_but_the_second
        assert (await c.ask(tiles(3))).status_code == 200
        assert told(c)[MISSING_XARG] == media_name(whole_of(asked(c)[0])) and PARTS_XARG not in told(c)


async def test_whoever_wants_the_same_image_meanwhile_waits_for_both_parts(two: Any) -> None:
    async with two as c:
        late = asyncio.Event()
        c["E0"].usual, c["E1"].usual = encodes(), once(late, encodes())
        both = [asyncio.create_task(c.ask(tiles(3))) for _ in range(2)]
        await c.until_metric("epd_proxy_stage_seconds_count", 1, stage="E", outcome="ok")
        await c.until_metric("epd_proxy_encode_coalesced_total", 1)
        assert not any(task.done() for task in both)
        late.set()
        assert [(await task).status_code for task in both] == [200, 200]
        assert len(asked(c)) == 2


async def test_a_client_that_leaves_leaves_nothing_behind(two: Any) -> None:
    async with two as c:
        c["E0"].usual, c["E1"].usual = encodes(), hangs
        asks = asyncio.create_task(c.ask(tiles(3)))
        await c.until_metric("epd_proxy_stage_seconds_count", 1, stage="E", outcome="ok")
        asks.cancel()
        await c.idle()


async def test_an_image_of_which_a_part_got_lost_is_encoded_again_whole() -> None:
    again = settings(image_tokens=TILING.image_tokens, on_missing_feature="reencode")
    async with cluster("E0", "E1", "PD0", config=again) as c:
        all_encode(c)
        await c.ask(tiles(3))
        key = whole_of(asked(c)[0])
        c["PD0"].script.append(loses(c, "deadline"))
        assert (await c.ask(tiles(3))).status_code == 200
        assert asked(c) == sorted([key, *part_keys(key, 2)])
        [words] = [
            call.body["vllm_xargs"]
            for name in ("E0", "E1")
            for call in c[name].calls
            if ENCODE_AGAIN_XARG in (call.body.get("vllm_xargs") or {})
        ]
        assert words[ENCODE_AGAIN_XARG] == key
        assert PARTS_XARG not in told(c), "parts of the first cut are still about"


async def test_a_feature_that_is_there_whole_is_used_whole(two: Any) -> None:
    async with two as c:
        all_encode(c)
        await c.ask(tiles(3))
        key = whole_of(asked(c)[0])
        c.pipeline.dispatcher.dispatch(FeatureReady(key, 100, "E0-life1", pooled=True))
        await c.ask(tiles(3))
        assert PARTS_XARG not in told(c) and len(asked(c)) == 2


@pytest.mark.parametrize(
    ("tiles", "items", "idle", "expected"),
    [(13, 1, 2, 2), (3, 1, 8, 3), (13, 2, 4, 2), (13, 3, 4, 1), (1, 1, 4, 1), (9, 1, 0, 1)],
)
def test_idle_encoders_are_divided_among_the_items_of_a_request(
    tiles: int, items: int, idle: int, expected: int
) -> None:
    assert parts_of(tiles, items, idle) == expected
