"""What is sent to stages that compute for real, all different: the requests of a round, and a storm of images."""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench.clients.results import Outcome
from bench.clients.sender import Bounds, Flow, Run, Sender
from bench.clients.target import requests
from bench.workloads.synthetic import QUESTION, demo_image, text_body
from deploy.host import event_loop
from epd_serve.errors import StageError

EVERY_TOKEN = {"ignore_eos": True, "return_token_ids": True}
"""Answers as long as asked for, and an event for each token: random weights also give tokens that have no text, and of
those vLLM sends nothing before the answer ends unless the client wants their ids."""
STORM_IMAGES = 2000
"""More than an encoder gets through in a storm: none is known to it."""
STORM_LIMIT_S, ENCODE_LIMIT_S = 600.0, 60.0


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
        numbers = range(seed * self.requests, (seed + 1) * self.requests)
        bodies = [stream_body(model, number, self.prompt, self.answer) for number in numbers]
        for place in random.Random(seed).sample(range(self.requests), self.images):
            shown = {"type": "image_url", "image_url": {"url": demo_image(numbers[place], self.side).url}}
            bodies[place]["messages"] = [{"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]}]
        return bodies


def stream_body(model: str, number: int, prompt: int, answer: int) -> dict[str, Any]:
    """A text that no other number gives, streamed token by token."""
    return text_body(model, tokens=prompt, answer=answer, stream=True, seed=number) | EVERY_TOKEN


def encode_body(model: str, url: str, name: str) -> dict[str, Any]:
    """What the proxy would ask of an encoder (`proxy/stages/bodies.py`): the image at `url` under a key of its own."""
    key = hashlib.sha256(name.encode()).hexdigest()
    part = {"type": "image_url", "image_url": {"url": url}, "uuid": key}
    return {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "stream": False}


@contextlib.contextmanager
def storm(encoder: str, model: str, *, side: int, concurrency: int) -> Iterator[Run]:
    """Images that storm an encoder (its URL) past the proxy: so many under way at any time, until the context ends.

    Every image has a name of its own, so that each is encoded; its pixels are the same. Sent from a thread of the
    measuring process, which has nothing else to do meanwhile. The run is over, and its records are all there, when the
    context has been left.

    Raises:
        StageError: on leaving, when an answer was not good.
    """
    image, name = demo_image(0, side).url, secrets.token_hex(4)
    flow = Flow(
        requests(encode_body(model, image, f"storm {name} {number}") for number in range(STORM_IMAGES)),
        concurrency=concurrency,
        duration_s=STORM_LIMIT_S,
    )
    sender = Sender(encoder, bounds=Bounds(ENCODE_LIMIT_S), decode=False, realtime=False)  # E's answer has no text
    with ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(event_loop.run, sender.run(flow))
        try:
            yield sender.result
        finally:
            sender.result.stopped = "the storm is over"  # what is under way is answered
            rows = under_way.result().rows
    if bad := [one for one in rows if not one.ok and one.outcome is not Outcome.CANCELLED]:
        raise StageError(f"{encoder} in a storm of images: {bad[0].fault}: {bad[0].error}", stage=encoder)
