"""Medians, ratios within a round and the names of figures, from samples of P→D transfers."""

from __future__ import annotations

import json

import pytest

from bench.transfer_pd_figures import MEASURES, Case, cells, figures, lines, paired_ratio
from tests.bench.pd_transfers import sample

MODES = ("bulk", "fixed:2", "adaptive")


def test_figures_have_the_names_they_are_quoted_by():
    named = figures(cells([sample("bulk", 4.0), sample("fixed:2", 3.0), sample("adaptive", 1.0)], MODES))

    assert named["real_exposed_adaptive_over_bulk_1024"] == pytest.approx(0.25)
    assert named["real_packets_adaptive_1024"] == 3
    assert named["real_overlap_1024_adaptive"] == pytest.approx(1 - 1.0 / 6.0)
    assert named["real_exposed_ms_fixed2_1024"] == pytest.approx(3.0)
    assert named["real_kv_adaptive_over_bulk_1024"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("shm", 256, 16), "real_packets_adaptive_256_c16"),
        (Case("mooncake", 256, 1), "real_packets_adaptive_256_mooncake"),
        (Case("mooncake", 256, 16), "real_packets_adaptive_256_mooncake_c16"),
    ],
)
def test_other_transports_and_concurrencies_have_a_suffix(case, name):
    assert figures(cells([sample("adaptive", 1.0, case=case)], MODES))[name] == 3


def test_a_machine_that_slows_down_does_not_change_ratios():
    taken = [
        sample(mode, exposed_ms * slow, turn=turn)
        for turn, slow in enumerate((1.0, 1.0, 9.0))
        for mode, exposed_ms in (("bulk", 4.0), ("adaptive", 1.0))
    ]

    *_, cell = cells(taken, MODES)

    assert f"{cell.over_base['exposed']:.3f}" == "0.250 (0.250–0.250)"


def test_of_requests_at_one_time_the_median_stands_for_the_round():
    case = Case("shm", 1024, 3)
    bulk = [sample("bulk", ms, case=case) for ms in (1.0, 2.0, 90.0)]
    adaptive = [sample("adaptive", ms, case=case) for ms in (1.0, 1.0, 50.0)]

    assert f"{paired_ratio(adaptive, bulk, MEASURES['exposed_ms']):.3f}" == "0.500 (0.500–0.500)"


def test_where_bulk_exposes_nothing_there_is_no_ratio():
    found = cells([sample("bulk", 0.0), sample("adaptive", 0.0)], MODES)

    assert "real_exposed_adaptive_over_bulk_1024" not in figures(found)
    assert [line[8] for line in lines(found)[1:]] == ["", ""]


def test_cells_come_by_case_and_in_the_order_of_the_modes():
    cases = [Case("mooncake", 256, 1), Case("shm", 256, 16), Case("shm", 1024, 1), Case("shm", 256, 1)]
    found = cells([sample(mode, 1.0, case=case) for case in cases for mode in reversed(MODES)], MODES)

    assert [cell.case for cell in found[:: len(MODES)]] == [cases[3], cases[2], cases[1], cases[0]]
    assert [cell.mode for cell in found[: len(MODES)]] == list(MODES)


def test_every_line_of_the_table_has_all_columns():
    head, *rows = lines(cells([sample("bulk", 4.0), sample("adaptive", 1.0)], MODES))

    assert {len(row) for row in rows} == {len(head)}
    assert rows[1][:3] == ("1024", "adaptive", "3")


def test_a_row_is_json_and_says_that_it_is_real():
    row = json.loads(json.dumps(sample("adaptive", 1.0).row()))

    assert row["kind"] == "real"
    assert (row["mode"], row["groups"], row["exposed_ms"], row["kv_ms"]) == ("adaptive", [5, 2, 1], 1.0, 6.0)
