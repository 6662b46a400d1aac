"""Features through E→P links: the paper's constants, exposed time and overlap from rows, and a link that runs."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import pytest

from bench.micro.ep.links import WAITING
from bench.micro.ep.transfers import BUSY, PREFILL, TABLE_3, event_latencies_ms, figures, measure
from bench.micro.measurement import Row
from epd_serve.phases.stamps import Stamp


def row(model: str, ms: float, *, mode: str = "arena", image: str = "4k", turn: int = 0) -> Row:
    sent = {"mode": mode, "picture": image, "tokens": 16206, "prefill": model, "round": turn, "load_ms": 10.0}
    waiting = model == WAITING
    return {**sent, "scheduling_ms": 0.0 if waiting else 700.0, "transfer_ms" if waiting else "exposed_ms": ms}


def test_the_paper_s_overlap_follows_from_its_latencies():
    for row in TABLE_3:
        assert 1 - row.exposed_ms / row.transfer_ms == pytest.approx(row.overlap, abs=5e-5)


def test_the_busy_p_is_the_paper_s():
    assert PREFILL[BUSY]["4k"] == pytest.approx(0.728109)


def test_an_event_takes_from_its_put_to_its_first_hearing():
    stamps = [
        Stamp(1.0, "E0", "a", "feature_put", {}),
        Stamp(1.001, "P0", "a", "feature_event", {}),
        Stamp(1.5, "P0", "a", "feature_event", {}),
        Stamp(2.0, "E0", "not heard", "feature_put", {}),
    ]

    assert event_latencies_ms(stamps, ["a", "not heard", "never sent"]) == [pytest.approx(1.0)]


def test_overlap_is_the_part_of_the_transfer_that_the_request_does_not_see():
    named = figures([row(WAITING, 20.0), row(BUSY, 5.0)])

    assert named == {"transfer_ms_4k_arena": 20.0, "exposed_ms_4k_arena": 5.0, "overlap_4k_arena": pytest.approx(0.75)}


@pytest.mark.parametrize(("exposed_ms", "overlap"), [(-0.1, 1.0), (21.0, 0.0)])
def test_overlap_stays_between_nothing_and_all(exposed_ms, overlap):
    assert figures([row(WAITING, 20.0), row(BUSY, exposed_ms)])["overlap_4k_arena"] == overlap


def test_medians_decide():
    rows = [row(WAITING, ms) for ms in (10.0, 20.0, 900.0)] + [row(BUSY, ms) for ms in (0.0, 2.0, 800.0)]

    assert figures(rows)["overlap_4k_arena"] == pytest.approx(0.9)


def test_modes_do_not_mix():
    named = figures(
        [row(WAITING, 20.0), row(WAITING, 100.0, mode="mooncake"), row(BUSY, 10.0), row(BUSY, 10.0, mode="mooncake")]
    )

    assert named["overlap_4k_arena"] == pytest.approx(0.5)
    assert named["overlap_4k_mooncake"] == pytest.approx(0.9)
    assert named["exposed_ms_4k_arena"] == named["exposed_ms_4k_mooncake"] == 10.0


def test_exposed_time_below_the_resolution_is_none():
    assert figures([row(WAITING, 20.0), row(BUSY, -0.2)])["exposed_ms_4k_arena"] == 0.0


@pytest.mark.slow
def test_features_pass_from_a_real_producer_to_a_real_consumer():
    asked = argparse.Namespace(modes=("arena",), pictures=("280x280",), rounds=1, events=300, budget_s=60.0)

    rows = list(measure(asked))

    sent = [row for row in rows if "mode" in row]
    assert {(row["mode"], row["prefill"]) for row in sent} == set(itertools.product(("arena",), PREFILL))
    assert all(row["transfer_ms"] > 0 for row in sent if row["prefill"] == WAITING)
    assert sum("event_ms" in row for row in rows) == 300
    assert list(Path("/dev/shm").glob(f"epd-bench-{os.getpid()}-*")) == []
