"""Figures of a run: over whole answers, over all requests, over time."""

from __future__ import annotations

import pytest

from bench.client.metrics import attainment, faults, summary
from bench.client.row import Outcome
from bench.client.run import Run
from bench.client.slo import Slo
from bench.client.window import Window
from tests.bench.client.rows import failed, row

SLO = Slo(200.0, 50.0)


def run_of(rows, ended=11.0) -> Run:
    return Run("r", 0.0, 10.0, ended, cpu_s=0.5, rows=rows)


def test_percentiles_are_of_whole_answers_and_attainment_of_all():
    rows = [row(n, 1.0 + n, ttft=0.1) for n in range(3)] + [row(3, 5.0, ttft=0.9), failed(4, 6.0)]
    found = summary(run_of(rows), Window(0.0, 10.0), [SLO], devices=2)

    assert found["ttft_ms"]["p50"] == 100.0
    assert found["ttft_ms"]["max"] == 900.0
    assert found["slo_200:50"]["attainment"] == 0.6
    assert (found["ok"], found["error"], found["requests"]) == (4, 1, 5)


def test_effective_throughput_is_of_those_that_attain_and_per_device():
    rows = [row(0, 1.0, tokens=40, ttft=0.1), row(1, 2.0, tokens=60, ttft=0.3)]
    found = summary(run_of(rows), Window(0.0, 10.0), [SLO], devices=2)

    assert found["output_tokens_per_s"] == 10.0
    assert found["slo_200:50"]["effective_tokens_per_s"] == 4.0
    assert found["slo_200:50"]["effective_tokens_per_s_per_device"] == 2.0
    assert "effective_tokens_per_s_per_device" not in summary(run_of(rows), Window(0, 10), [SLO], None)["slo_200:50"]


def test_the_drain_counts_nothing_for_throughput():
    found = summary(run_of([row(0, 9.9, ttft=0.2, tokens=50)], ended=20.0), Window(0.0, 10.0), [], None)

    assert found["output_tokens_per_s"] == 0.0
    assert found["answered_rps"] == 0.0
    assert found["offered_rps"] == 0.1


def test_a_run_without_good_answers_has_no_latencies():
    found = summary(run_of([failed()]), Window(0.0, 10.0), [SLO], None)

    assert "ttft_ms" not in found
    assert found["slo_200:50"]["attainment"] == 0.0


def test_one_request_is_a_run():
    found = summary(Run("r", 0.0, 0.0, 1.0, rows=[row(0, 0.0)]), Window(0.0, 0.0), [SLO], None)

    assert found["ttft_ms"]["p99"] == 100.0
    assert "offered_rps" not in found


def test_clients_that_left_are_no_fault():
    rows = [failed(fault="left", outcome=Outcome.CANCELLED), failed(), failed(), failed(fault="cut")]

    assert faults(rows) == {"status 429": 2, "cut": 1}
    assert attainment(rows, SLO) == (0, 3)


def test_what_requests_brought_themselves_is_judged_apart():
    rows = [row(0, 1.0, slo_ttft_ms=150.0), row(1, 1.0, slo_ttft_ms=50.0), row(2, 1.0)]

    assert summary(run_of(rows), Window(0.0, 10.0), [], None)["slo_own"] == {"attainment": 0.5, "requests": 2}


def test_the_generator_says_how_late_it_was_and_what_it_cost():
    rows = [row(n, 1.0, ready_s=1.02) for n in range(10)]
    found = summary(run_of(rows, ended=10.0), Window(0.0, 10.0), [], None)["generator"]

    assert found["late_p99_ms"] == pytest.approx(20.0)
    assert found["cpu_share"] == 0.05
    assert found["cpu_us_per_request"] == 50_000.0
