"""Rows: what is measured of a request, and that a file gives back what it was given."""

from __future__ import annotations

import json

import pytest

from bench.client.row import Row
from tests.bench.client.rows import failed, row


def test_times_count_from_when_a_request_was_due():
    one = row(due=10.0, ttft=0.5, gap=0.02, tokens=4, ready_s=10.1)

    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.02)
    assert one.itl_s == pytest.approx([0.02] * 3)
    assert one.e2e_s == pytest.approx(0.56)
    assert one.late_s == pytest.approx(0.1)


def test_tokens_are_the_servers_count_where_events_carry_several():
    one = row(ttft=0.1, gap=0.02, tokens=3, usage_tokens=5)

    assert one.tpot_s == pytest.approx(0.04 / 4)
    assert row(tokens=3, usage_tokens=None).output_tokens == 3


def test_an_answer_of_one_token_has_no_time_per_token():
    assert row(tokens=1).tpot_s is None
    assert failed().ttft_s is None


@pytest.mark.parametrize("one", [row(3, 7.25, slo_ttft_ms=800.0), failed(1, 2.5)])
def test_a_row_comes_back_from_its_json(one):
    back = Row.from_json(json.loads(json.dumps(one.to_json())))

    assert back.token_s == pytest.approx(one.token_s, abs=1e-6)
    assert {**back.to_json(), "tokens_ms": 0} == {**one.to_json(), "tokens_ms": 0}
