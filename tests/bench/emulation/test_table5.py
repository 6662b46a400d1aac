"""Table 5: the loads that its rows imply, the figures of a run, and how an emulated table is compared with it."""

from __future__ import annotations

import pytest

from bench.client.row import Outcome, Row
from bench.client.run import Run
from bench.emulation.agreement import agreement, emulated_table
from bench.emulation.loads import Loads
from bench.emulation.printed import Said
from bench.emulation.report import implied_table, reading_table, said_table, sensitivity_table
from bench.emulation.sensitivity import AVERAGE_PICTURE, Variation, sensitivity, variations
from bench.emulation.table5 import PRINTED, Row5, mean_row, readings, row5
from tests.bench.emulation.emulated import DEVICE

RATES = {"TP1x2": 3.0, "EP-D": 3.0, "E-P-D": 3.0}


def test_implied_request_totals_by_hand():
    """13.38 tokens/s · 2 devices / 0.0215 / 64 tokens = 19.45 requests a second; and so on."""
    found = {name: row.implied_rps for name, row in PRINTED.items()}

    by_hand = {"TP1x2": 19.45, "(E-PD)x2": 19.67, "EP-D": 8.21, "(E-P)-D": 9.24, "(E-D)-P": 9.54, "E-P-D": 9.57}
    assert found == pytest.approx(by_hand, abs=0.01)


def test_printed_attainments_are_shares_of_512_requests():
    for row in PRINTED.values():
        assert row.attainment == pytest.approx(round(row.attainment * 512) / 512, abs=0.6e-4)


def test_monoliths_ran_at_twice_the_load_of_the_others():
    by_reading = readings()

    assert set(by_reading["total"].values()) == {10.0}
    assert by_reading["monoliths"] == {**by_reading["total"], "TP1x2": 20.0, "(E-PD)x2": 20.0}
    assert by_reading["implied"]["TP1x2"] > 2 * by_reading["implied"]["E-P-D"]


def test_the_row_of_a_run():
    def answered(ttft_s: float, tpot_s: float) -> Row:
        tokens = tuple(ttft_s + tpot_s * n for n in range(64))
        return Row("r", 0, "a", "a", 0.0, 0.0, tokens[-1], Outcome.OK, 0.0, tokens, tokens[-1], usage_tokens=64)

    run = Run(
        "r", ended_s=10.0, rows=[answered(1.0, 0.04), answered(3.0, 0.04), answered(1.0, 0.06), answered(2.0, 0.05)]
    )

    found = row5(run, devices=2)

    assert found.ttft_ms == pytest.approx(1750) and found.tpot_ms == pytest.approx(47.5)
    assert found.attainment == 0.5
    assert found.per_device == pytest.approx(2 * 64 / 10 / 2)
    assert found.implied_rps == pytest.approx(4 / 10)


def test_seeds_are_averaged():
    assert mean_row([Row5(2, 1, 2, 0.5, 4), Row5(2, 3, 4, 0.7, 8)]) == Row5(2, 2, 3, 0.6, 6)


def test_a_table_agrees_with_itself_and_says_which_pairs_do_not():
    turned = {**PRINTED, "EP-D": PRINTED["(E-P)-D"], "(E-P)-D": PRINTED["EP-D"]}

    assert agreement(PRINTED).spearman == pytest.approx(dict.fromkeys(agreement(PRINTED).spearman, 1.0))
    assert agreement(PRINTED).by_chance["per_device"] == pytest.approx(1 / 720)
    assert agreement(turned).flipped["per_device"] == [("EP-D", "(E-D)-P"), ("EP-D", "(E-P)-D"), ("(E-D)-P", "(E-P)-D")]


def test_loads_are_equal_for_equal_seeds_and_pictures_can_be_made_alike():
    loads, alike = Loads(20), Loads(20, size=AVERAGE_PICTURE)

    assert loads.at(10, 0) == Loads(20).at(10, 0) != loads.at(10, 1)
    assert loads.at(5, 0)[-1].arrival_s == pytest.approx(2 * loads.at(10, 0)[-1].arrival_s)
    assert {(one.width, one.height) for spec in alike.at(10, 0) for one in spec.images} == {AVERAGE_PICTURE}


def test_a_constant_that_matters_turns_what_it_should():
    """Encoding ten times as slow fills the fused encoder and leaves the one apart time."""
    loads = Loads(30)
    sourced = emulated_table(DEVICE, loads, RATES, (0,))
    slow = Variation("slow encode", DEVICE.scaled("encode_s_per_token", 10.0), "encode_s_per_token")
    same = Variation("nothing", DEVICE)

    first, second = sensitivity(sourced, [same, slow], RATES, (0,), 30)

    assert first.table == sourced and first.turned == []
    assert second.table != sourced
    assert "of 2 variations turn no pair" in sensitivity_table([first, second])


def test_every_constant_is_varied_both_ways_beside_the_readings():
    names = [one.name for one in variations(DEVICE, {"another reading": DEVICE})]

    assert {"decode_s -30%", "decode_s +30%", "encode_slows_prefill +30%", "another reading"} <= set(names)
    assert len(names) == len(set(names))


def test_tables_name_what_they_show():
    table = {name: PRINTED[name] for name in RATES}

    assert "19.45" in implied_table()
    assert "Spearman" in reading_table("total", table, RATES, agreement(table))
    assert "used" in said_table([Said("TTFT", "Table 2", 1.0, 2.0, 1.5, used=True)])
