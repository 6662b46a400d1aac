"""A 4K image over two encoders: the ratio round by round, and what the tower takes of it; and stages that run."""

from __future__ import annotations

import argparse

import pytest

from bench.micro.ep.tiles import figures, measure, tower_s
from epd_serve.phases.stamps import Stamp


def test_what_slows_a_round_slows_both_and_the_ratio_is_of_rounds():
    rows = [
        {"kind": kind, "round": turn, "encoders": of, "ttft_ms": slow * ms}
        for turn, slow in enumerate((1.0, 5.0, 2.0))
        for kind, times in (("real", (100.0, 70.0)), ("simulated", (200.0, 120.0)))
        for of, ms in zip((1, 2), times, strict=True)
    ]

    named = figures(rows)

    assert (named["tile_ttft_over_one"], named["tile_ttft_over_one_simulated"]) == (0.7, 0.6)
    assert (named["tile_ttft_ms_1"], named["tile_ttft_ms_2"]) == (200.0, 140.0)


def test_the_tower_works_from_the_first_encoders_beginning_to_the_last_ones_end():
    stamps = [
        Stamp(t, instance, key, event, {})
        for t, instance, key, event in (
            (1.0, "E0", "k/0-2", "encode_start"),
            (1.5, "E1", "k/1-2", "encode_start"),
            (3.0, "E1", "k/1-2", "encoded"),
            (2.0, "E0", "k/0-2", "encoded"),
            (9.0, "proxy", "r", "encoded"),
        )
    ]

    assert tower_s(stamps) == 2.0 and tower_s(stamps[-1:]) == 0.0


@pytest.mark.slow
@pytest.mark.e2e
def test_rounds_on_real_and_simulated_stages():
    rows = list(measure(argparse.Namespace(rounds=1, budget_s=60.0)))

    assert [(row["kind"], row["encoders"]) for row in rows if row["encoders"] == 2] == [("simulated", 2), ("real", 2)]
    assert all(row["tower_ms"] > 0 for row in rows if row["kind"] == "real")
