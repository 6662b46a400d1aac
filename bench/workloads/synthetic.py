"""Single requests made by hand: text and images for simulated stages, and images that the demo model can describe.

Simulated stages count four bytes of text as a token, and 28 x 28 pixels.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, PngImagePlugin

from epd_serve.demo.pictures import describe, draw, scene
from epd_serve.sim.tokens import TOKEN_BYTES

WORDS = "What a proxy may never do is to lose a request that it has taken. "
QUESTION = "What is in the picture?"
MAX_TOKENS = 24


def text_body(model: str, *, tokens: int, answer: int, stream: bool, seed: int = 0) -> dict[str, Any]:
    """A prompt of about `tokens`, an answer of exactly `answer`."""
    size_bytes = tokens * TOKEN_BYTES
    text = (f"{seed}: " + WORDS * (size_bytes // len(WORDS) + 1))[:size_bytes]
    return _body(model, text, answer, stream=stream)


def image_body(
    model: str,
    *,
    side: int,
    answer: int,
    stream: bool,
    seed: int,
    noise: bool = False,
    more: Sequence[int] = (),
) -> dict[str, Any]:
    """An image of side x side pixels that no other seed gives: one colour, or noise, which no PNG makes smaller than 3
    bytes a pixel; and the seed in a text chunk. `more`: seeds of further images."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    for one in (seed, *more):
        chunk = PngImagePlugin.PngInfo()
        chunk.add_text("seed", str(one))
        image = Image.new("L", (side, side), one % 256)
        if noise:
            image = Image.frombytes("RGB", (side, side), random.Random(one).randbytes(side * side * 3))
        url = _data_url(image, pnginfo=chunk, compress_level=1)
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return _body(model, parts, answer, stream=stream)


@dataclass(frozen=True)
class DemoImage:
    """An image as a data URL, and what the demo model says about it when it is right."""

    url: str
    answer: str


def demo_image(seed: int, size: int) -> DemoImage:
    """An image that no other seed gives: its corner pixels write the seed."""
    shapes = scene(seed)
    drawn = draw(shapes, size)
    for bit in range(24):
        drawn.putpixel((bit, 0), (255, 255, 255 - (seed >> bit & 1)))
    return DemoImage(_data_url(drawn), describe(shapes))


def demo_body(model: str, image: DemoImage) -> dict[str, Any]:
    """The streamed question about an image whose answer is known."""
    parts = [{"type": "image_url", "image_url": {"url": image.url}}, {"type": "text", "text": QUESTION}]
    return _body(model, parts, MAX_TOKENS, stream=True)


def _body(model: str, content: Any, answer: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": answer, "temperature": 0, "stream": stream}


def _data_url(image: Image.Image, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
