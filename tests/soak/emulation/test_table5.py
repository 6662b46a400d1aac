"""Table 5: the loads that its rows imply, the figures of a run, and how an emulated table is compared with it."""

from __future__ import annotations

import pytest

from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Run
from tests.soak.emulation.emulated import DEVICE
from tests.soak.emulation.printed import TABLE_5, Table5Row
from tests.soak.table5 import (
    AVERAGE_IMAGE,
    METRICS,
    READINGS,
    Load,
    against_print,
    agreement,
    emulated_table,
    other_numbers,
    sensitivity,
    swapped,
    table5_row,
    variations,
)

RATES = {"TP1x2": 3.0, "EP-D": 3.0, "E-P-D": 3.0}


def test_implied_request_totals_by_hand():
    """13.38 tokens/s · 2 devices / 0.0215 / 64 tokens = 19.45 requests a second; and so on."""
    found = {name: row.implied_rps for name, row in TABLE_5.items()}

    by_hand = {"TP1x2": 19.45, "(E-PD)x2": 19.67, "EP-D": 8.21, "(E-P)-D": 9.24, "(E-D)-P": 9.54, "E-P-D": 9.57}
    assert found == pytest.approx(by_hand, abs=0.01)


def test_printed_attainments_are_shares_of_512_requests():
    for row in TABLE_5.values():
        assert row.attainment == pytest.approx(round(row.attainment * 512) / 512, abs=0.6e-4)


def test_monoliths_ran_at_twice_the_load_of_the_others():
    by_reading = {name: reading.rates for name, reading in READINGS.items()}

    assert set(by_reading["total"].values()) == {10.0}
    assert by_reading["monoliths"] == {**by_reading["total"], "TP1x2": 20.0, "(E-PD)x2": 20.0}
    assert by_reading["implied"]["TP1x2"] > 2 * by_reading["implied"]["E-P-D"]


def test_the_row_of_a_run():
    def answered(ttft_s: float, tpot_s: float) -> RequestRecord:
        tokens = tuple(ttft_s + tpot_s * n for n in range(64))
        times = {"token_s": tokens, "last_s": tokens[-1]}
        return RequestRecord("r", 0, "a", "a", 0.0, 0.0, tokens[-1], Outcome.OK, usage_tokens=64, **times)

    run = Run(
        "r", ended_s=10.0, rows=[answered(1.0, 0.04), answered(3.0, 0.04), answered(1.0, 0.06), answered(2.0, 0.05)]
    )

    found = table5_row(run, devices=2)

    assert found.ttft_ms == pytest.approx(1750) and found.tpot_ms == pytest.approx(47.5)
    assert found.attainment == 0.5
    assert found.per_device == pytest.approx(2 * 64 / 10 / 2)
    assert found.implied_rps == pytest.approx(4 / 10)


def ordered(*per_device: float) -> dict[str, Table5Row]:
    """A table of which only the throughput counts."""
    return {name: Table5Row(2, 0.0, 0.0, 0.0, value) for name, value in zip(TABLE_5, per_device, strict=False)}


def test_seeds_are_averaged():
    one, two, both = (emulated_table(DEVICE, Load(20), {"EP-D": 3.0}, seeds)["EP-D"] for seeds in ((0,), (1,), (0, 1)))

    assert one != two
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(one, two, strict=True)])


def test_a_table_agrees_with_itself():
    for metric in METRICS:
        assert agreement(TABLE_5, metric) == pytest.approx({"spearman": 1.0, "kendall": 1.0})


def test_of_five_orders_two_neighbours_are_turned():
    """Printed ranks 1 2 3 5 4 against 2 1 3 5 4: the squares of the differences sum to 2, 1 - 6·2 / (5·24) = 0.9.

    Of ten pairs one stands the other way: (9 - 1) / 10.
    """
    found = agreement(ordered(20, 10, 30, 50, 40), "per_device")

    assert found == pytest.approx({"spearman": 0.9, "kendall": 0.8})


def test_equal_values_agree_with_nothing():
    assert agreement(ordered(1, 1, 1), "per_device") == {"spearman": 0.0, "kendall": 0.0}


def test_pairs_that_turn_are_named_and_a_tie_is_no_order():
    turned = {**TABLE_5, "EP-D": TABLE_5["(E-P)-D"], "(E-P)-D": TABLE_5["EP-D"]}

    assert swapped(TABLE_5, turned) == [("EP-D", "(E-D)-P"), ("EP-D", "(E-P)-D"), ("(E-D)-P", "(E-P)-D")]
    assert swapped(ordered(1, 2, 3), ordered(1, 1, 3)) == []


def test_loads_are_equal_for_equal_seeds_and_images_can_be_made_alike():
    load, alike = Load(20), Load(20, AVERAGE_IMAGE)

    assert load.at(10, 0) == Load(20).at(10, 0) != load.at(10, 1)
    assert load.at(5, 0)[-1].arrival_s == pytest.approx(2 * load.at(10, 0)[-1].arrival_s)
    assert {(one.width, one.height) for spec in alike.at(10, 0) for one in spec.images} == {AVERAGE_IMAGE}


def test_every_constant_is_varied_both_ways_beside_the_readings_and_seeds() -> None:
    names = [one.name for one in variations(DEVICE, {"another reading": DEVICE}, Load(20))]

    assert {"decode_s -30%", "decode_s +30%", "encode_slows_prefill +30%", "another reading", "seed 9"} <= set(names)
    assert len(names) == len(set(names))


def test_a_variation_that_matters_changes_the_table_and_one_that_does_not_turns_nothing() -> None:
    """Encoding ten times as slow fills the fused encoder and leaves the one apart time."""
    slow = {"slow encode": DEVICE.scaled("encode_s_per_token", 10.0), "nothing": DEVICE}

    text, figures, rows = sensitivity(DEVICE, slow, Load(30))

    by_name = {row["variation"]: row for row in rows}
    assert by_name["nothing"]["turned"] == by_name["seed 0"]["turned"] == []
    assert by_name["slow encode"]["table"]["EP-D"]["ttft_ms"] > 2 * by_name["nothing"]["table"]["EP-D"]["ttft_ms"]
    still = sum(not row["turned"] for row in rows)
    assert f"{still} of {len(rows)} variations turn no pair" in text
    assert figures["rank_correlation_table5_min"] <= figures["sensitivity/decode_s +30%"]
    seeds = [figures[f"sensitivity/seed {seed}"] for seed in range(10)]
    assert figures["rank_correlation_table5_seeds_min"] == min(seeds)
    assert figures["rank_correlation_table5_seeds_max"] == max(seeds)


def test_emulated_values_stand_beside_the_printed_ones() -> None:
    table = {**TABLE_5, "EP-D": TABLE_5["(E-P)-D"], "(E-P)-D": TABLE_5["EP-D"]}

    text, figures, (row,) = against_print("implied", table)
    assert "19.45" in text and "658.3 (658.3)" in text and "(E-D)-P above (E-P)-D" in text
    assert figures["rank_correlation_table5_implied_load"] == figures["agreement/implied/per_device/spearman"] < 1
    assert row["flips"]["per_device"] == swapped(TABLE_5, table)


def test_what_else_the_paper_prints_is_beside_what_was_emulated() -> None:
    found = {one.name: one for one in other_numbers(DEVICE, Load(20))}

    assert len(found) == 13 and sum(one.used for one in found.values()) == 4
    assert all(one.low <= one.high for one in found.values())
