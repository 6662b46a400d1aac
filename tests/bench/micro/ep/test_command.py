"""What `epd-bench transfer ep` measures with, its constants and its goals."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import pytest

from bench.cli import main
from bench.micro.ep.command import GOALS, PREFILL, TABLE_3, event_latencies_ms, transfers
from bench.micro.measurement import Goal, goal_table
from epd_serve.phases.stamps import Stamp


def test_the_paper_s_overlap_follows_from_its_latencies():
    for row in TABLE_3:
        assert 1 - row.exposed_ms / row.transfer_ms == pytest.approx(row.overlap, abs=5e-5)


def test_the_busy_p_is_the_paper_s():
    assert PREFILL["busy"]["4k"] == pytest.approx(0.728109) and PREFILL["idle"]["4k"] == 0.0132


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
    assert {"event_p50_ms", "event_p99_ms"} <= named


@pytest.mark.parametrize("flags", [["--modes", "arenas"], ["--pictures", "8k"]])
def test_an_unknown_mode_or_image_is_named(capsys, flags):
    with pytest.raises(SystemExit):
        main(["transfer", "ep", *flags])

    assert flags[0] in (message := capsys.readouterr().err) and flags[1] in message


@pytest.mark.slow
def test_features_pass_from_a_real_producer_to_a_real_consumer():
    asked = argparse.Namespace(pictures=("280x280",), rounds=1, events=300, budget_s=60.0)

    rows = list(transfers(("arena",), asked))

    sent = [row for row in rows if "mode" in row]
    models = ("waiting", "idle", "busy")
    assert {(row["mode"], row["prefill"]) for row in sent} == set(itertools.product(("arena",), models))
    assert all(row["transfer_ms"] > 0 for row in sent if row["prefill"] == "waiting")
    assert sum("event_ms" in row for row in rows) == 300
    assert list(Path("/dev/shm").glob(f"epd-bench-{os.getpid()}-*")) == []
