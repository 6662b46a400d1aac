"""A request's time in an emulated layout, by hand; and that nothing is lost, early, or different in a second run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.clients.measure import Plan, Rules, judged
from bench.workloads.requests import Poisson
from epd_serve.layout_parser import parse
from tests.soak.emulation.deployment import emulate
from tests.soak.emulation.emulated import DEVICE, PICTURE, request, served
from tests.soak.emulation.printed import TABLE_5

ENCODE = 0.001 * PICTURE
PREFILL = 0.002 * (PICTURE + 10)
HANDOVER = 0.04
KV = 0.02
LAST_PROMPT_TOKEN = 0.002  # D computes it again
STEP = 0.011  # a decode step of one


def test_one_request_alone_takes_the_sum_of_its_stages():
    (row,) = served("E-P-D", request(1, 2.0)).rows

    assert row.ttft_s == pytest.approx(0.5 + ENCODE + HANDOVER + PREFILL + KV + LAST_PROMPT_TOKEN)
    assert [later - earlier for earlier, later in pairwise(row.token_s)] == pytest.approx([STEP] * 3)
    assert row.path == "E-P-D" and row.instances == "E0,P0,D0"


def test_a_fused_stage_encodes_and_prefills_in_one_step_and_hands_nothing_over():
    (row,) = served("EP-D", request(1, 0.0)).rows

    assert row.ttft_s == pytest.approx(0.5 + ENCODE + PREFILL + KV + LAST_PROMPT_TOKEN)


def test_a_monolith_has_no_transfer_at_all():
    (row,) = served("TP1", request(1, 0.0)).rows

    assert row.ttft_s == pytest.approx(0.5 + ENCODE + PREFILL)
    assert row.tpot_s == pytest.approx(STEP)


def test_text_passes_the_encoder_by():
    (row,) = served("E-P-D", request(1, 0.0, pictures=0)).rows

    assert row.ttft_s == pytest.approx(0.5 + 0.002 * 10 + KV + LAST_PROMPT_TOKEN)
    assert row.path == "P-D"


def test_prompts_wait_for_each_other_in_order_of_arrival():
    rows = served("E-P-D", *(request(n, 0.3 * n / 10, tokens=1) for n in range(6))).rows

    assert [row.id for row in rows] == [f"r{n}" for n in range(6)]
    assert [row.first_s for row in rows] == sorted(row.first_s for row in rows)


def test_two_monoliths_share_the_load():
    rows = served("TP1x2", request(1, 0.0), request(2, 0.0)).rows

    assert {row.instances for row in rows} == {"EPD0", "EPD1"}
    assert [row.ttft_s for row in rows] == pytest.approx([0.5 + ENCODE + PREFILL] * 2)


@pytest.mark.parametrize("layout", [*TABLE_5, "2E-P-D", "(E-P-D)", "E-2PD", "EPD-E-PD"])
def test_every_request_gets_all_its_tokens_in_order(layout):
    requests = [request(n, 0.05 * n, pictures=n % 3, tokens=1 + n % 5) for n in range(20)]

    rows = served(layout, *requests).rows

    assert {row.id: row.output_tokens for row in rows} == {one.id: one.max_tokens for one in requests}
    assert all(row.token_s == tuple(sorted(row.token_s)) for row in rows)
    assert all(row.ttft_s > 0.5 for row in rows)


@pytest.mark.parametrize("layout", TABLE_5)
def test_a_second_run_is_the_same(layout):
    requests = [request(n, 0.04 * n) for n in range(15)]

    assert served(layout, *requests) == served(layout, *requests)


def test_no_work_is_lost_or_done_twice_when_blocks_are_short():
    """KV for two requests at a time: what does not fit waits, and both sides drain."""
    tight = replace(DEVICE, kv_tokens=272, block_tokens=16)

    rows = served("E-P-D", *(request(n, 0.0, tokens=6) for n in range(8)), device=tight).rows

    assert [row.output_tokens for row in rows] == [6] * 8


def test_a_run_is_judged_as_a_measured_one():
    run = served("E-P-D", *(request(n, 0.5 * n) for n in range(30)))

    found = judged(run, Plan(Poisson(2.0), count=30, devices=3, rules=Rules(min_samples=5)))

    assert found.valid and found.figures["ttft_ms"]["p50"] > 500
    assert found.figures["slo_2000:50:p90"]["attainment"] == 1.0


def test_first_token_goes_past_a_device_whose_neighbour_is_busy_where_least_loaded_sees_no_difference():
    turns = replace(DEVICE, encode_slows_prefill=2.0)
    both = [request(1, 0.0), request(2, 0.05, pictures=0, text=50)]

    def ttft_s(policy: str) -> dict[str, float | None]:
        run = emulate(parse("(E-PD)x2"), turns, both, "one", policy)
        return {row.instances: row.ttft_s for row in run.rows}

    blind, seeing = ttft_s("least-loaded"), ttft_s("first-token")

    encoder = next(names for names in seeing if names.startswith("E"))[:2]
    assert {"E0": "PD1", "E1": "PD0"}[encoder] in seeing, "text"
    assert sum(seeing.values()) < sum(blind.values())
