"""What is sent to stages that compute for real, all different: the requests of a round, images, encodes alone."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import random
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from bench.workloads.synthetic import text_body
from epd_serve.demo.pictures import draw, scene

QUESTION = "What is in the picture?"
EVERY_TOKEN = {"ignore_eos": True, "return_token_ids": True}
"""Answers as long as asked for, and an event for each token: random weights also give tokens that have no text, and of
those vLLM sends nothing before the answer ends unless the client wants their ids."""

DRAWN = 4


@dataclass(frozen=True)
class Mix:
    """The requests of a round.

    Attributes:
        requests: how many, of which `images` have an image of side x side pixels that nothing else shows.
        concurrency: requests under way.
        answer: tokens of every answer, exactly. prompt: tokens of a text, about.
    """

    requests: int
    images: int
    concurrency: int
    answer: int
    side: int = 640
    prompt: int = 64

    def bodies(self, model: str, seed: int) -> list[dict[str, Any]]:
        """The same ones for the same seed, with images and texts in a drawn order."""
        kinds = [place < self.images for place in range(self.requests)]
        random.Random(seed).shuffle(kinds)
        numbers = range(seed * self.requests, (seed + 1) * self.requests)
        return [self._body(model, number, image) for number, image in zip(numbers, kinds, strict=True)]

    def _body(self, model: str, number: int, image: bool) -> dict[str, Any]:
        body = stream_body(model, number, self.prompt, self.answer)
        if image:
            shown = {"type": "image_url", "image_url": {"url": numbered_image(number, self.side)}}
            body["messages"] = [{"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]}]
        return body


def stream_body(model: str, number: int, prompt: int, answer: int) -> dict[str, Any]:
    """A text that no other number gives, streamed token by token."""
    return text_body(model, tokens=prompt, answer=answer, stream=True, seed=number) | EVERY_TOKEN


def encode_body(model: str, url: str, name: str) -> dict[str, Any]:
    """What the proxy would ask of an encoder (`proxy/stages/bodies.py`): the image at `url` under a key of its own."""
    key = hashlib.sha256(name.encode()).hexdigest()
    part = {"type": "image_url", "image_url": {"url": url}, "uuid": key}
    return {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "stream": False}


def numbered_image(number: int, side: int) -> str:
    """An image that no other number gives, as a data URL: one of a few, its number written in its corner pixels.

    To draw an image takes as long as to encode a small one, and one core of two is not to be busy with that.
    """
    image = _drawn(number % DRAWN, side).copy()
    for bit in range(24):
        image.putpixel((bit, 0), (255, 255, 255 - (number >> bit & 1)))
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


@functools.cache
def _drawn(seed: int, side: int) -> Image:
    return draw(scene(seed), side)
