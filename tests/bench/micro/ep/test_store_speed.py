"""The store's speed against plain copies: figures from what was timed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.micro.ep.store_speed import ARENA_RATIOS, arena_ms, figures


def test_every_way_through_the_arena_is_timed_and_its_file_goes():
    taken_ms = arena_ms(100_000, 10)

    assert {name for ratio in ARENA_RATIOS.values() for name in ratio} <= taken_ms.keys()
    assert all(len(ms) == 10 and min(ms) > 0 for ms in taken_ms.values())
    assert not Path(f"/dev/shm/epd-bench-{os.getpid()}").exists()


def test_the_arena_is_compared_by_medians_and_size_by_size():
    taken_ms = {"copy in": [1.0, 2.0, 9.0], "put": [3.0, 1.0, 4.0], "copy out": [1.0], "get": [1.2]}
    taken_ms["get, no checksum"] = [1.1]

    assert figures([{"store": "arena", "size": "8m", "taken_ms": taken_ms}]) == {
        "put_over_memcpy_8m": 1.5,
        "get_over_memcpy_8m": pytest.approx(1.2),
        "get_over_memcpy_8m_nosum": pytest.approx(1.1),
    }


def test_the_second_tier_is_compared_turn_by_turn():
    taken_ms = {"raw client": [1.0, 10.0, 2.0], "fetch": [2.0, 20.0, 4.0], "fetch, no checksum": [1.0, 10.0, 2.0]}

    assert figures([{"store": "mooncake", "size": "8m", "taken_ms": taken_ms}]) == {
        "mooncake_get_over_raw_client_8m": 2.0,
        "mooncake_get_over_raw_client_8m_nosum": 1.0,
    }
