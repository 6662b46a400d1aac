"""Requests made by hand: images that no two seeds share, prompts of a length."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from bench.workloads.synthetic import demo_body, demo_image, image_body, text_body
from epd_serve.sim.tokens import TOKEN_BYTES


def shown(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_no_two_demo_images_are_the_same():
    assert len({demo_image(seed, 64).url for seed in range(200)}) == 200


def test_a_demo_image_has_its_size_and_the_answer_that_describes_it():
    image = demo_image(3, 96)

    assert shown(image.url).size == (96, 96)
    assert image.answer and demo_image(3, 64).answer == image.answer
    body = demo_body("m", image)
    assert (body["model"], body["stream"]) == ("m", True)
    assert body["messages"][0]["content"][0]["image_url"]["url"] == image.url


@pytest.mark.parametrize("tokens", [1, 16, 500])
def test_a_prompt_has_its_length_and_its_seed(tokens):
    one, other = (text_body("m", tokens=tokens, answer=8, stream=False, seed=seed) for seed in (1, 2))

    assert len(one["messages"][0]["content"]) == tokens * TOKEN_BYTES
    assert (one["max_tokens"], one["stream"]) == (8, False)
    assert one != other


def test_images_of_one_colour_differ_by_their_seed_and_have_their_side():
    urls = [
        image_body("m", side=56, answer=1, stream=True, seed=seed)["messages"][0]["content"][1]["image_url"]["url"]
        for seed in (1, 257)
    ]

    assert urls[0] != urls[1]
    assert {shown(url).size for url in urls} == {(56, 56)}
