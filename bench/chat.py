"""The client of a measurement: one streamed chat request with a demo picture, timed to its first content."""

from __future__ import annotations

import base64
import io
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from epd_serve.demo.pictures import describe, draw, scene
from epd_serve.errors import StageError

QUESTION = "What is in the picture?"
MAX_TOKENS = 24


@dataclass(frozen=True)
class Picture:
    """A demo picture as a data URL, and what the demo model says about it when it is right."""

    url: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """One request. Times are CLOCK_MONOTONIC seconds; `request_id` is empty where no proxy was asked."""

    request_id: str
    sent: float
    first_content: float
    ended: float
    text: str

    @property
    def ttft_s(self) -> float:
        return self.first_content - self.sent


def picture(seed: int, size: int) -> Picture:
    """A picture that no other seed gives: its corner pixels write the seed."""
    shapes = scene(seed)
    drawn = draw(shapes, size)
    for bit in range(24):
        drawn.putpixel((bit, 0), (255, 255, 255 - (seed >> bit & 1)))
    data = io.BytesIO()
    drawn.save(data, "PNG")
    return Picture("data:image/png;base64," + base64.b64encode(data.getvalue()).decode(), describe(shapes))


def body(model: str, shown: Picture) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": shown.url}}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}


def ask(client: httpx.Client, url: str, request: dict[str, Any]) -> Answer:
    """Send one request and read its stream to the end.

    Raises:
        StageError: not 200, an error in the stream, or an end without content.
    """
    raw = json.dumps(request).encode()
    words: list[str] = []
    first = 0.0
    sent = time.monotonic()
    headers = {"content-type": "application/json"}
    with client.stream("POST", f"{url}/v1/chat/completions", content=raw, headers=headers) as response:
        if response.status_code != 200:
            raise StageError(f"{url} answers {response.status_code}: {response.read()[:500]!r}", stage=url)
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise StageError(f"{url} broke its stream: {event['error']}", stage=url)
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text and not words:
                first = time.monotonic()
            words += [text] if text else []
    if not words:
        raise StageError(f"{url} answered without content", stage=url)
    ended = time.monotonic()
    return Answer(response.headers.get("x-request-id", ""), sent, first, ended, "".join(words))
