"""P and D without an encoder: they get metadata alone, and everything else is made of that at the encoders."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from epd_serve.roles import Role
from proxy.config.limits import Timeouts
from proxy.generate.recovery import Next, next_step
from proxy.request.parse import Endpoint
from tests.proxy.fakes import breaks, cluster, data_url, encodes, hangs, image_file, refuses, settings, text_body
from tests.proxy.generate.test_delivery import kinds, loses
from tests.proxy.generate.test_retry import DIED, FAULT, LOST, METADATA, REFUSAL, ctx, failed
from tests.waiting import until

CHAT = Endpoint.CHAT.value
ENCODER_FREE = settings(send_pixels="never")
URLS = [data_url(image_file(color=color)) for color in ("red", "blue")]


@pytest.mark.parametrize(
    ("failure", "state", "then"),
    [
        ({"error": FAULT, "missing": LOST}, {}, Next.ENCODE_AGAIN),
        ({"error": FAULT, "missing": LOST}, {"encoded_again": 1}, Next.ENCODE_AGAIN),
        ({"error": FAULT, "missing": LOST}, {"encoded_again": 2}, Next.GIVE_UP),
        ({"error": FAULT, "missing": LOST, "went_ahead": True}, {}, Next.REPEAT),
        ({"error": DIED, "listening": False}, {}, Next.ENCODE_AGAIN),
        ({"error": DIED}, {"doubted": True}, Next.RETRY),
        ({"error": REFUSAL}, {}, Next.GIVE_UP),
    ],
)
def test_no_failure_is_followed_by_pixels(failure: dict[str, Any], state: dict[str, Any], then: Next) -> None:
    assert next_step(failed(**failure, **METADATA), ctx(**state), ENCODER_FREE) is then


def test_a_lost_feature_is_encoded_again_once_even_where_nothing_is_tried_again() -> None:
    lost, config = failed(FAULT, missing=LOST, **METADATA), replace(ENCODER_FREE, retries=0)
    assert next_step(lost, ctx(), config) is Next.ENCODE_AGAIN
    assert next_step(lost, ctx(encoded_again=1), config) is Next.GIVE_UP


async def test_a_lost_feature_is_encoded_again_and_again() -> None:
    async with cluster("E0", "P0", "D0", config=ENCODER_FREE) as c:
        c["E0"].usual = encodes()
        c["P0"].script.extend([loses(c), loses(c)])
        c["D0"].script.extend([hangs, hangs])
        assert (await c.ask()).status_code == 200
        await c.idle()
        assert kinds(c, "P0") == ["metadata!"] * 3 and len(c["E0"].calls) == 3


async def test_what_is_lost_for_ever_ends_the_request_with_an_error() -> None:
    async with cluster("E0", "PD0", config=ENCODER_FREE) as c:
        c["E0"].usual = encodes()
        c["PD0"].usual = loses(c)
        answer = await c.ask()
        assert answer.status_code == 502
        assert kinds(c, "PD0") == ["metadata!"] * 3


async def test_a_refusal_of_a_stage_is_the_answer() -> None:
    async with cluster("E0", "PD0", config=ENCODER_FREE) as c:
        c["E0"].usual = encodes()
        c["PD0"].usual = refuses(400, "too long")
        answer = await c.ask()
        assert answer.status_code == 400 and "too long" in answer.text
        assert kinds(c, "PD0") == ["metadata!"]


async def test_metadata_that_is_not_known_is_asked_of_an_encoder_though_the_store_has_the_feature() -> None:
    async with cluster("E0", "PD0", config=ENCODER_FREE) as c:
        c["E0"].usual = encodes()
        assert (await c.ask()).status_code == 200
        for feature in c.pipeline.directory._features.values():
            feature.metadata = None  # as after a restart of the proxy, which still sees the arena
        assert (await c.ask()).status_code == 200
        assert (await c.ask()).status_code == 200
        assert kinds(c, "PD0") == ["metadata!"] * 3 and len(c["E0"].calls) == 2


async def test_items_that_no_encoder_makes_are_a_503_and_no_stage_is_asked() -> None:
    async with cluster("E0", "PD0", config=replace(ENCODER_FREE, timeouts=Timeouts(instance_wait_s=0.2))) as c:
        c["E0"].usual = breaks
        answer = await c.ask()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_encoded"
        assert answer.headers["retry-after"]
        assert not c["PD0"].calls
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200


async def test_an_encoder_that_is_on_its_way_is_waited_for() -> None:
    async with cluster("E0", "PD0", config=ENCODER_FREE, wanted=(Role.E, Role.PD)) as c:
        c["E0"].usual = encodes()
        c.table.mark_down("E0", "it was killed")
        asked = asyncio.create_task(c.ask())
        await until(lambda: bool(c.pipeline._encode.flights))
        assert not asked.done() and not c["PD0"].calls
        c.table.mark_up("E0")
        assert (await asked).status_code == 200
        assert kinds(c, "PD0") == ["metadata!"]


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_options_of_the_processor_are_refused_with_media_alone(name: str) -> None:
    async with cluster("E0", "PD0", config=replace(ENCODER_FREE, trust_request_mm_kwargs=True)) as c:
        c["E0"].usual = encodes()
        answer = await c.ask(**{name: {"image": {}}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
        assert not c["E0"].calls
        assert (await c.client.post(CHAT, json=text_body(**{name: {"image": {}}}))).status_code == 200


async def test_tokens_of_a_prompt_with_media_are_counted_by_an_encoder() -> None:
    async with cluster("E0", "PD0", config=ENCODER_FREE) as c:
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URLS[0]}}]}]
        assert (await c.client.post("/tokenize", json={"messages": messages})).status_code == 200
        assert len(c["E0"].calls) == 1 and not c["PD0"].calls
        assert (await c.client.post("/tokenize", json={"prompt": "Hello"})).status_code == 200
        assert len(c["PD0"].calls) == 1
