"""Tensor parallelism of different sizes on the two ends of a KV link, on real stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.bodies import SOLO, Body, ask
from tests.e2e.serving import Serving

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("launch", ["P:tp2-D", "P-D:tp2", "P:tp2-D:tp2"], indirect=True)
@pytest.mark.parametrize("name", ["text", "one picture", "three pictures of different sizes", "a long prompt"])
def test_heads_find_their_ranks(launch: Serving, solo_answer: Callable[[Body], list[list[int]]], name: str) -> None:
    assert ask(launch, SOLO[name]) == solo_answer(SOLO[name])
    for instance in ("P0", "D0"):
        assert launch.kv_blocks_in_use(instance) == 0


@pytest.mark.parametrize("launch", ["E-P:tp2-D"], indirect=True)
def test_features_reach_every_rank(launch: Serving, solo_answer: Callable[[Body], list[list[int]]]) -> None:
    body = SOLO["three pictures of different sizes"]
    assert ask(launch, body) == solo_answer(body)
    assert launch.settled_counters("P0")["slab_copied"] == 3, "all ahead of the step that reads them"
