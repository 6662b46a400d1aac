"""Requests of a workload as traffic without content (`epd_serve/traffic.py`), for planner and simulator."""

from __future__ import annotations

from collections.abc import Callable

from bench.workloads.requests import RequestSpec
from epd_serve.image_tokens import ByArea
from epd_serve.traffic import Item, Request

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
