"""Request bodies of the scenarios: text of so many tokens, pictures of so many, all different, small on the wire.

Simulated stages count four bytes of text as a token, and 28 x 28 pixels.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image, PngImagePlugin

from epd_serve.sim.tokens import TOKEN_BYTES

WORDS = "What a proxy may never do is to lose a request that it has taken. "


def text(model: str, *, tokens: int, answer: int, stream: bool, seed: int = 0) -> dict[str, Any]:
    """A prompt of about `tokens`, an answer of exactly `answer`."""
    length = tokens * TOKEN_BYTES
    words = (f"{seed}: " + WORDS * (length // len(WORDS) + 1))[:length]
    return {**_common(model, answer, stream), "messages": [{"role": "user", "content": words}]}


def picture(model: str, *, side: int, answer: int, stream: bool, seed: int) -> dict[str, Any]:
    """A picture of side x side pixels that no other seed gives."""
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": _png(side, seed)}},
    ]
    return {**_common(model, answer, stream), "messages": [{"role": "user", "content": parts}]}


def _common(model: str, answer: int, stream: bool) -> dict[str, Any]:
    return {"model": model, "max_tokens": answer, "temperature": 0, "stream": stream}


def _png(side: int, seed: int) -> str:
    """As a data URL: one colour, and the seed in a text chunk."""
    words = PngImagePlugin.PngInfo()
    words.add_text("seed", str(seed))
    file = io.BytesIO()
    Image.new("L", (side, side), seed % 256).save(file, "PNG", pnginfo=words, compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
