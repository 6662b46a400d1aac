"""Requests of a workload as traffic without content (`epd_serve/traffic.py`), for planner and simulator, and back: a
recording as requests of its sizes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

from bench.workloads.distributions import seeded_rng
from bench.workloads.generate import Words
from bench.workloads.requests import ImageRef, RequestSpec
from epd_serve.image_tokens import ByArea
from epd_serve.traffic import Item, Request, read_traffic

Tokens = Callable[[int, int], int]
"""Of an image of (width, height)."""


def traffic_of(spec: RequestSpec, tokens: Tokens = ByArea().tokens, *, template_tokens: int = 0) -> Request:
    """A request that has a time.

    Args:
        tokens: the model's rule for an image; without one 28x28 pixels are a token. template_tokens: of the chat
            template, which workloads leave out.
    """
    assert spec.arrival_s is not None
    items = tuple(Item(tokens(one.width, one.height), one.width, one.height, key=one.key) for one in spec.images)
    prompt_tokens = max(1, template_tokens + spec.text_tokens + sum(item.tokens for item in items))
    return Request(spec.id, spec.arrival_s, prompt_tokens, spec.max_tokens, items)


SIDE = 28.0
"""Of a token in pixels, where nobody has noted the size of an item."""


def recorded(path: Path, words: Words) -> list[RequestSpec]:
    """Requests as they were recorded: images of their sizes, equal ones for equal keys, texts and answers of as many
    tokens, at their times. Raises ConfigError: see `read_traffic`."""
    specs = []
    for one in read_traffic(path):
        seeds = (hash_of(item.key or f"{one.id}/{number}") for number, item in enumerate(one.items))
        sides = (max(28, round(SIDE * math.sqrt(item.tokens))) for item in one.items)
        images = tuple(
            ImageRef(item.width or side, item.height or side, seed)
            for item, side, seed in zip(one.items, sides, seeds, strict=True)
        )
        tokens = max(1, one.text_tokens)
        text = words.exactly(tokens, seeded_rng("recorded", one.session or one.id))
        specs.append(RequestSpec(one.id, text, images, one.output_tokens, tokens, arrival_s=one.at_s))
    return specs


def hash_of(name: str) -> int:
    """A seed."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
