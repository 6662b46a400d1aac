"""Medians, ratios within a round and the names of figures, from samples of P→D transfers."""

from __future__ import annotations

import json

import pytest

from bench.micro.pd.figures import cells, figures
from tests.bench.micro.pd.transfers_made import row

MODES = ("bulk", "fixed:2", "adaptive")


def test_figures_have_the_names_they_are_quoted_by():
    named = figures([row("bulk", 4.0), row("fixed:2", 3.0), row("adaptive", 1.0)])

    assert named["real_exposed_adaptive_over_bulk_1024"] == pytest.approx(0.25)
    assert named["real_packets_adaptive_1024"] == 3
    assert named["real_overlap_1024_adaptive"] == pytest.approx(1 - 1.0 / 6.0, abs=1e-4)
    assert named["real_exposed_ms_fixed2_1024"] == pytest.approx(3.0)
    assert named["real_kv_adaptive_over_bulk_1024"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ({"concurrency": 16}, "real_packets_adaptive_256_c16"),
        ({"transport": "mooncake"}, "real_packets_adaptive_256_mooncake"),
        ({"transport": "mooncake", "concurrency": 16}, "real_packets_adaptive_256_mooncake_c16"),
        ({"device": "cuda"}, "cuda_packets_adaptive_256"),
    ],
)
def test_other_transports_and_concurrencies_have_a_suffix(case, name):
    assert figures([row("adaptive", 1.0, tokens=256, **case)])[name] == 3


def test_a_machine_that_slows_down_does_not_change_ratios():
    taken = [
        row(mode, exposed_ms * slow, turn=turn)
        for turn, slow in enumerate((1.0, 1.0, 9.0))
        for mode, exposed_ms in (("bulk", 4.0), ("adaptive", 1.0))
    ]

    *_, cell = cells(taken)

    assert f"{cell.over_base['exposed']:.3f}" == "0.250 (0.250–0.250)"


def test_where_bulk_exposes_nothing_there_is_no_ratio():
    rows = [row("bulk", 0.0), row("adaptive", 0.0)]

    assert "real_exposed_adaptive_over_bulk_1024" not in figures(rows)
    assert "exposed" not in cells(rows)[1].over_base


def test_cells_come_by_case_and_in_the_order_of_the_modes():
    cases = [("mooncake", 256, 1), ("shm", 256, 16), ("shm", 1024, 1), ("shm", 256, 1)]
    found = cells(
        row(mode, 1.0, transport=transport, tokens=tokens, concurrency=concurrency)
        for transport, tokens, concurrency in cases
        for mode in MODES
    )

    assert [(cell.transport, cell.tokens, cell.concurrency) for cell in found[:: len(MODES)]] == cases[::-1]
    assert [cell.mode for cell in found[: len(MODES)]] == list(MODES)


def test_a_row_is_json_and_says_that_it_is_real():
    saved = json.loads(json.dumps(row("adaptive", 1.0)))

    assert saved["kind"] == "real"
    assert (saved["mode"], saved["groups"], saved["exposed_ms"], saved["kv_ms"]) == ("adaptive", [5, 2, 1], 1.0, 6.0)
