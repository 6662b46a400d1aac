"""The encode step: what E gets, how items are spread, and going on without E."""

from __future__ import annotations

import asyncio

import pytest

from epd_serve.image_tokens import Resized
from epd_serve.roles import Role
from proxy.config.limits import Timeouts
from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    breaks,
    cluster,
    data_url,
    hangs,
    image_body,
    image_file,
    refuses,
    settings,
)

CHAT = Endpoint.CHAT.value


async def test_the_encoder_gets_the_images_and_everyone_gets_the_same_keys() -> None:
    urls = [data_url(image_file(color=color)) for color in ("red", "blue")]
    async with cluster("E0", "P0", "D0", config=settings(trust_request_mm_kwargs=True)) as c:
        body = image_body(*urls, mm_processor_kwargs={"max_pixels": 100}, temperature=0)
        assert (await c.client.post(CHAT, json=body)).status_code == 200
        await c.idle()
        [encode], [prefill], [decode] = c["E0"].calls, c["P0"].calls, c["D0"].calls
    [message] = encode.body["messages"]
    assert {**encode.body, "messages": None} == {
        "model": "demo", "messages": None, "max_tokens": 1, "stream": False, "mm_processor_kwargs": {"max_pixels": 100},
    }  # fmt: skip
    assert [part["image_url"]["url"] for part in message["content"]] == urls
    keys = [part["uuid"] for part in message["content"]]
    assert len(set(keys)) == 2 and all(len(key) == 68 for key in keys)
    for call in (prefill, decode):
        text, *images = call.body["messages"][0]["content"]
        assert text == {"type": "text", "text": "what is this?"}
        assert images == message["content"]
        assert call.headers["x-request-id"] == encode.headers["x-request-id"]


async def test_prefill_and_decode_wait_for_every_encoder() -> None:
    async with cluster("E0", "P0", "D0") as c:
        released = asyncio.Event()

        async def slow(*arguments: object) -> None:
            await released.wait()
            await refuses(500, "late")(*arguments)  # type: ignore[arg-type]

        c["E0"].script.append(slow)
        request = asyncio.create_task(c.client.post(CHAT, json=image_body()))
        await c["E0"].until(lambda stage: stage.active == 1)
        assert not c["P0"].calls and not c["D0"].calls
        released.set()
        assert (await request).status_code == 200


async def test_items_are_spread_over_encoders_by_pixels_and_sent_once() -> None:
    sizes = [(64, 64), (8, 8), (32, 64), (64, 32)]
    urls = [data_url(image_file(*size)) for size in sizes]
    async with cluster("E0", "E1", "PD0", config=settings()) as c:
        assert (await c.client.post(CHAT, json=image_body(*urls))).status_code == 200
        shares = [[urls.index(part["image_url"]["url"]) for part in content(c[name])] for name in ("E0", "E1")]
        assert sorted([index for index in share if index != 1] for share in shares) == [[0], [2, 3]]
        same = [data_url(image_file(color="green"))] * 3
        assert (await c.client.post(CHAT, json=image_body(*same))).status_code == 200
        assert len(c["E0"].calls) + len(c["E1"].calls) == 3
        assert len(c["PD0"].calls[1].body["messages"][0]["content"]) == 4


def content(stage: object) -> list[dict[str, dict[str, str]]]:
    return stage.calls[0].body["messages"][0]["content"]  # type: ignore[attr-defined,no-any-return]


async def test_an_encoder_that_fails_is_replaced_by_another() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        c["E0"].script.append(refuses(500, "boom"))
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        assert len(c["E0"].calls) == len(c["E1"].calls) == 1
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_failed") == 0


@pytest.mark.parametrize("failure", [refuses(500, "boom"), breaks, hangs])
async def test_without_a_working_encoder_the_request_goes_on_with_pixels(failure: object) -> None:
    hurried = settings(timeouts=Timeouts(encode_s=0.2))
    async with cluster("E0", "P0", "D0", config=hurried) as c:
        c["E0"].script.append(failure)  # type: ignore[arg-type]
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        assert c.metric("epd_proxy_encode_fallback_total", reason="encoder_failed") == 1


async def test_with_every_encoder_down_nothing_waits_for_one() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c.table.mark_down("E0", "killed")
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        assert c.metric("epd_proxy_encode_fallback_total", reason="no_encoder") == 1
        assert not c["E0"].calls


async def test_an_encoders_refusal_is_the_clients_error() -> None:
    async with cluster("E0", "E1", "P0", "D0") as c:
        c["E0"].script.append(refuses(400, "bad image"))
        response = await c.client.post(CHAT, json=image_body())
        assert response.status_code == 400 and response.json()["error"]["message"] == "bad image"
        assert not c["P0"].calls and not c["E1"].calls


async def test_a_client_that_leaves_cancels_the_encoder() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].script.append(hangs)
        request = asyncio.create_task(c.client.post(CHAT, json=image_body()))
        await c["E0"].until(lambda stage: stage.active == 1)
        request.cancel()
        await c["E0"].until(lambda stage: stage.cancelled == 1)
        await c.idle()


async def test_fused_encoders_get_no_encode_step() -> None:
    async with cluster("EP0", "D0") as c:
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        await c.idle()
        assert len(c["EP0"].calls) == 1 and "kv_transfer_params" in c["EP0"].calls[0].body


async def test_an_image_weighs_what_the_model_s_processor_makes_of_it() -> None:
    config = settings(image_tokens=Resized(32, 65536, 1048576), timeouts=Timeouts(encode_s=0.3))
    async with cluster("E0", "PD0", config=config) as c:
        c["E0"].usual = hangs
        request = asyncio.create_task(c.client.post(CHAT, json=image_body(data_url(image_file(280, 310)))))
        await c["E0"].until(lambda stage: stage.active == 1)
        (encoder,) = c.table.live(Role.E)
        assert encoder.load == 9 * 10
        assert (await request).status_code == 200
