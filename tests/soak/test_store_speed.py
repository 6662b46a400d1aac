"""The store's speed against plain copies: figures from what was timed, and those of the committed result."""

from __future__ import annotations

import json

import pytest

from bench.record import ROOT
from tests.soak import mooncake_get, store_speed


def test_the_figures_of_the_committed_result_follow_from_its_rows():
    saved = json.loads((ROOT / "bench" / "results" / "arena.json").read_text())

    assert store_speed.figures(saved["rows"]) == pytest.approx(saved["figures"], rel=2e-3, abs=2e-3)


def test_every_way_through_the_arena_is_timed():
    taken_ms = store_speed.median_ms(100_000, 20)

    assert {name for ratio in store_speed.RATIOS.values() for name in ratio} <= taken_ms.keys()
    assert all(ms > 0 for ms in taken_ms.values())


def test_the_second_tier_is_compared_turn_by_turn():
    taken_ms = {"raw client": [1.0, 10.0, 2.0], "fetch": [2.0, 20.0, 4.0], "fetch, no checksum": [1.0, 10.0, 2.0]}

    assert mooncake_get.figures(taken_ms) == {
        "mooncake_get_over_raw_client_8m": 2.0,
        "mooncake_get_over_raw_client_8m_nosum": 1.0,
    }
