"""The emulation of P→D transfers: what its clock says of cases worked out by hand, and what its figures must hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.papers import kv_emulation
from bench.papers.devices import atlas_800i_a2 as paper
from bench.papers.devices.pair import DevicePair
from bench.papers.emulation.kv_pair import Arrival, Mode, VirtualPair
from bench.papers.printed import TABLE_4_CONCURRENCY, TABLE_4_GROUPED, TABLE_4_LAYERWISE
from epd_serve.kv.grouping import AdaptiveGrouping, BulkGrouping, FixedGrouping

# 4 layers of 1 ms per token; a token's layer is 1 kB; a packet takes 1 ms and 1 ms per kB.
DEVICE = DevicePair("by hand", 4, 4000, s_per_token=1e-3, s_per_token_squared=0.0, setup_s=1e-3, s_per_byte=1e-6)
LAYERWISE = FixedGrouping(1, "layerwise")


def served(mode, arrivals, device=DEVICE, step_tokens=math.inf):
    return VirtualPair(device, mode, step_tokens).run(arrivals)


def test_bulk_exposes_all_of_its_one_packet():
    run = served(Mode("bulk", BulkGrouping()), [Arrival(0.0, 10)])

    assert run.prefill_s == pytest.approx(0.040)
    assert [one.packet.size_bytes for one in run.moved] == [40_000]
    assert (run.kv_s, run.prompts[0].exposed_s) == pytest.approx((0.041, 0.041))


def test_a_link_slower_than_the_compute_works_from_the_first_layer_to_the_end():
    """Written at 10, 20, 30, 40 ms; a packet takes 11 ms; the first begins at 10 and none ever waits for a layer."""
    run = served(Mode("layerwise", LAYERWISE), [Arrival(0.0, 10)])

    assert [one.begun_s for one in run.moved] == pytest.approx([0.010, 0.021, 0.032, 0.043])
    assert run.prompts[0].exposed_s == pytest.approx(0.014)


def test_what_begins_with_the_last_layer_hides_one_layers_compute():
    run = served(Mode("late", LAYERWISE, begins_with_layer=4), [Arrival(0.0, 10)])

    assert run.moved[0].begun_s == pytest.approx(0.030)
    assert run.prompts[0].exposed_s == pytest.approx(run.kv_s - 0.010)


def test_requests_of_a_step_share_packets_or_have_their_own():
    arrivals = [Arrival(0.0, 5)] * 2
    shared = served(Mode("", LAYERWISE), arrivals)
    own = served(Mode("", LAYERWISE, merged=False), arrivals)

    assert (len(shared.moved), len(own.moved)) == (4, 8)
    assert own.kv_s - shared.kv_s == pytest.approx(4 * DEVICE.setup_s)


def test_a_request_is_done_after_its_own_packets():
    first, second = served(Mode("", BulkGrouping(), merged=False), [Arrival(0.0, 5)] * 2).prompts

    assert (first.exposed_s, second.exposed_s) == pytest.approx((0.021, 0.042))


@pytest.mark.parametrize("grouping", [LAYERWISE, BulkGrouping(), AdaptiveGrouping(0)], ids=lambda one: one.name)
def test_chunks_of_a_prompt_move_every_byte_once(grouping):
    run = served(Mode("", grouping), [Arrival(0.0, 25), Arrival(0.05, 7), Arrival(3.0, 1)], step_tokens=10)

    assert sum(one.packet.size_bytes for one in run.moved) == (25 + 7 + 1) * 4000
    assert [one.prefill_end_s for one in run.prompts] == pytest.approx([0.120, 0.128, 3.004])
    assert all(one.done_s >= one.prefill_end_s for one in run.prompts)


def test_kv_that_is_written_early_in_its_layer_hides_behind_the_rest_of_it():
    early = replace(DEVICE, s_per_byte=1e-7, tail=0.5)
    run = served(Mode("", LAYERWISE), [Arrival(0.0, 10)], early)

    assert run.moved[-1].begun_s == pytest.approx(0.035)
    assert run.prompts[0].exposed_s == 0.0


def test_the_sourced_line_gives_the_1024_token_rows_back():
    """Two equations, two unknowns; that the 2048-token rows are near is the only thing found."""
    for tokens, tolerance in ((1024, 1e-3), (2048, 0.15)):
        nbytes = paper.BYTES_PER_TOKEN * TABLE_4_CONCURRENCY * tokens
        for row, packets in (
            (TABLE_4_LAYERWISE[tokens], paper.LAYERS),
            (TABLE_4_GROUPED[tokens], paper.OPTIMISED_GROUPS),
        ):
            kv_ms = (packets * TABLE_4_CONCURRENCY * paper.SETUP_S + nbytes * paper.S_PER_BYTE) * 1e3
            assert kv_ms == pytest.approx(row.kv_ms, rel=tolerance)


def test_the_printed_payload_is_latency_times_bandwidth():
    for tokens, row in (*TABLE_4_LAYERWISE.items(), *TABLE_4_GROUPED.items()):
        nbytes = paper.BYTES_PER_TOKEN * TABLE_4_CONCURRENCY * tokens
        assert row.kv_ms / 1e3 * row.bandwidth_gb_per_s * 1e9 == pytest.approx(nbytes, rel=2e-3)
        assert 1 - row.exposed_ms / row.kv_ms == pytest.approx(row.overlap, abs=1e-4)


@pytest.fixture(scope="module")
def quick():
    return kv_emulation.run_emulation(quick=True)


def test_the_goals_are_met_as_sourced(quick):
    figures, _, _ = quick
    assert all(goal.met(figures[goal.figure]) for goal in kv_emulation.GOALS)


def test_the_papers_baseline_comes_out_near_its_rows_and_far_from_ours(quick):
    figures, _, _ = quick
    assert figures["emu_overlap_1024_layerwise"] == pytest.approx(TABLE_4_LAYERWISE[1024].overlap, abs=0.03)
    assert figures["emu_overlap_2048_layerwise"] == pytest.approx(TABLE_4_LAYERWISE[2048].overlap, abs=0.03)
    assert 0.95 < figures["emu_overlap_1024_adaptive"] < figures["emu_overlap_2048_adaptive"]


def test_no_row_and_no_table_passes_for_a_measurement(quick):
    _, rows, tables = quick
    assert all("emulated" in row["kind"] for row in rows)
    assert all(text.startswith("emulated") for text in tables)


def test_every_mode_moves_the_same_bytes(quick):
    _, rows, _ = quick
    for tokens in kv_emulation.LENGTHS:
        moved = {
            round(row["kv_ms"] * row["gb_per_s"], 3)
            for row in rows
            if row.get("tokens") == tokens and row["concurrency"] == 16
        }
        assert max(moved) == pytest.approx(min(moved), rel=1e-6)


@pytest.mark.slow
def test_no_fixed_size_beats_adaptive_on_any_variation_of_the_device():
    figures, _, tables = kv_emulation.run_emulation(quick=False)
    worst = [figures[name] for name in figures if name.startswith("exposed_adaptive_over_best_fixed_worst")]

    assert len(worst) == 3 and max(worst) <= 1.05
    assert all(name in tables[-1] for name in paper.VARIATIONS)
