"""What `epd-bench transfer ep` measures with, its constants and its goals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.cli import main
from bench.goals import Goal, goal_table
from bench.mooncake_get import ratios
from bench.paper import TABLE_3
from bench.stamps import Stamp
from bench.transfer import GOALS, event_latencies_ms, prefill_models, transfers


def test_the_paper_s_overlap_follows_from_its_latencies():
    for row in TABLE_3:
        exposed_ms = max(0.0, row.transfer_ms - row.scheduling_ms)
        assert 1 - exposed_ms / row.transfer_ms == pytest.approx(row.overlap, abs=5e-5)


def test_the_emulated_latency_is_varied_unless_in_a_hurry():
    assert [model.name for model in prefill_models(quick=True)] == ["idle", "busy"]
    named = {model.name: model.scheduling_s["4k"] for model in prefill_models(quick=False)}
    assert named["busy-30%"] == pytest.approx(0.7 * 0.728109)
    assert named["busy+30%"] == pytest.approx(1.3 * 0.728109)


def test_an_event_takes_from_its_put_to_its_first_hearing():
    stamps = [
        Stamp(1.0, "E0", "a", "feature_put", {}),
        Stamp(1.001, "P0", "a", "feature_event", {}),
        Stamp(1.5, "P0", "a", "feature_event", {}),
        Stamp(2.0, "E0", "not heard", "feature_put", {}),
    ]

    assert event_latencies_ms(stamps, ["a", "not heard", "never sent"]) == [pytest.approx(1.0)]


def test_a_goal_is_met_missed_or_not_measured():
    goals = (Goal("fast", "<=", 1.0), Goal("much", ">=", 0.9), Goal("one", "==", 1), Goal("absent", "<=", 1.0))

    table = goal_table({"fast": 2.0, "much": 0.95, "one": 1.0}, goals).splitlines()

    assert ["MISSED" in line for line in table[1:]] == [True, False, False, False]
    assert ["met" in line.split() for line in table[1:]] == [False, True, True, False]
    assert "not measured" in table[-1]


def test_every_figure_of_the_contract_has_a_goal():
    named = {goal.figure for goal in GOALS}

    assert {"overlap_1080p_arena", "overlap_4k_arena", "overlap_1080p_mooncake", "exposed_ms_4k_arena"} <= named
    assert {"arena_put_over_memcpy_8m", "arena_get_over_memcpy_8m", "mooncake_get_over_raw_client_8m"} <= named
    assert {"encodes_for_64_duplicates", "event_p50_ms", "event_p99_ms"} <= named


@pytest.mark.parametrize("flags", [["--modes", "arenas"], ["--pictures", "8k"]])
def test_an_unknown_mode_or_picture_is_named(capsys, flags):
    assert main(["transfer", "ep", *flags]) == 1

    assert flags[1] in capsys.readouterr().err


@pytest.mark.slow
def test_features_pass_from_a_real_producer_to_a_real_consumer():
    samples, latencies_ms = transfers(["sync_arena", "arena"], ["280x280"], rounds=1, quick=True)

    assert {(sample.mode, sample.model) for sample in samples} == {
        (mode, model) for mode in ("sync_arena", "arena") for model in ("", "idle", "busy")
    }
    assert all(sample.exposed_s > 0 for sample in samples if not sample.model)
    assert len(latencies_ms) == 300
    assert list(Path("/dev/shm").glob(f"epd-bench-{os.getpid()}-*")) == []


def test_the_second_tier_is_compared_turn_by_turn():
    found = ratios({"raw client": [1.0, 10.0, 2.0], "fetch": [2.0, 20.0, 4.0], "fetch, no checksum": [1.0, 10.0, 2.0]})

    assert found == {"mooncake_get_over_raw_client_8m": 2.0, "mooncake_get_over_raw_client_8m_nosum": 1.0}
