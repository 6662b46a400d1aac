"""Requests made by hand: prompts have the tokens that were asked for, images are valid, different and small."""

from __future__ import annotations

import base64
import io
import json

from PIL import Image

from bench.workloads.synthetic import image_body, text_body
from epd_serve.sim.items import item_of
from epd_serve.sim.prompts import CHAT, prompts_of


def test_prompts_have_the_tokens_that_were_asked_for() -> None:
    (prompt,) = prompts_of(CHAT, text_body("m", tokens=100, answer=3, stream=True, seed=7), 0)
    assert 100 <= prompt.tokens <= 106
    body = image_body("m", side=56, answer=3, stream=False, seed=1)
    (prompt,) = prompts_of(CHAT, body, 0)
    assert prompt.items[0].tokens == 4 and body["max_tokens"] == 3


def test_images_are_valid_differ_and_are_small() -> None:
    bodies = [image_body("m", side=1344, answer=1, stream=True, seed=seed) for seed in (1, 257)]
    first, second = map(json.dumps, bodies)
    assert first != second and len(first) < 20_000
    url = bodies[0]["messages"][0]["content"][1]["image_url"]["url"]
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as shown:
        assert shown.size == (1344, 1344)
    item = item_of({"image_url": {"url": url}}, 0)
    assert item is not None and item.tokens == 48 * 48
