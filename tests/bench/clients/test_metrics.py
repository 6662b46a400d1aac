"""Figures of a run: over whole answers, over all requests, over time."""

from __future__ import annotations

import pytest

from bench.clients.metrics import Window, faults, steady_window, summary, throughput
from bench.clients.results import Outcome
from bench.clients.sender import Run
from bench.clients.slo import attainment
from epd_serve.errors import StageError
from epd_serve.slo import Slo
from tests.bench.clients.made import failed, row

SLO = Slo(200.0, 50.0)


def run_of(rows, ended=11.0) -> Run:
    return Run("r", 0.0, 10.0, ended, cpu_s=0.5, rows=rows)


def test_percentiles_are_of_whole_answers_and_attainment_of_all():
    rows = [row(n, 1.0 + n, ttft=0.1) for n in range(3)] + [row(3, 5.0, ttft=0.9), failed(4, 6.0)]
    found = summary(run_of(rows), Window(0.0, 10.0), [SLO], devices=2)

    assert found["ttft_ms"]["p50"] == 100.0
    assert found["ttft_ms"]["max"] == 900.0
    assert found["slo_200:50:p90"]["attainment"] == 0.6
    assert [name for name in found if name.startswith("slo_")] == ["slo_200:50:p90", "slo_200:50:mean"]
    assert (found["ok"], found["error"], found["requests"]) == (4, 1, 5)


def test_effective_throughput_is_of_those_that_attain_and_per_device():
    rows = [row(0, 1.0, tokens=40, ttft=0.1), row(1, 2.0, tokens=60, ttft=0.3)]
    found = summary(run_of(rows), Window(0.0, 10.0), [SLO], devices=2)

    assert found["output_tokens_per_s"] == 10.0
    assert found["slo_200:50:p90"]["effective_tokens_per_s"] == 4.0
    assert found["slo_200:50:p90"]["effective_tokens_per_s_per_device"] == 2.0
    assert (
        "effective_tokens_per_s_per_device" not in summary(run_of(rows), Window(0, 10), [SLO], None)["slo_200:50:p90"]
    )


def test_the_drain_counts_nothing_for_throughput():
    found = summary(run_of([row(0, 9.9, ttft=0.2, tokens=50)], ended=20.0), Window(0.0, 10.0), [], None)

    assert found["output_tokens_per_s"] == 0.0
    assert found["answered_rps"] == 0.0
    assert found["offered_rps"] == 0.1


def test_a_run_without_good_answers_has_no_latencies():
    found = summary(run_of([failed()]), Window(0.0, 10.0), [SLO], None)

    assert "ttft_ms" not in found
    assert found["slo_200:50:p90"]["attainment"] == 0.0


def test_one_request_is_a_run():
    found = summary(Run("r", 0.0, 0.0, 1.0, rows=[row(0, 0.0)]), Window(0.0, 0.0), [SLO], None)

    assert found["ttft_ms"]["p99"] == 100.0
    assert "offered_rps" not in found


def test_clients_that_left_are_no_fault():
    rows = [failed(fault="left", outcome=Outcome.CANCELLED), failed(), failed(), failed(fault="cut")]

    assert faults(rows) == {"status 429": 2, "cut": 1}
    assert attainment(rows, SLO) == 0.0


def test_the_generator_says_how_late_it_was_and_what_it_cost():
    rows = [row(n, 1.0, ready_s=1.02) for n in range(10)]
    found = summary(run_of(rows, ended=10.0), Window(0.0, 10.0), [], None)["generator"]

    assert found["late_p99_ms"] == pytest.approx(20.0)
    assert found["cpu_share"] == 0.05
    assert found["cpu_us_per_request"] == 50_000.0


def test_the_window_leaves_out_the_beginning_and_the_drain():
    assert steady_window(100.0, 200.0, None) == Window(110.0, 200.0)
    assert steady_window(100.0, 200.0, 30.0) == Window(130.0, 200.0)
    assert steady_window(100.0, 100.0, 5.0).length_s == 0.0


def test_a_request_counts_where_it_was_due_however_long_it_took():
    rows = [row(0, 0.5), row(1, 1.5, ttft=99.0), row(2, 2.5)]

    assert [one.n for one in Window(1.0, 2.0).due(rows)] == [1]


def test_tokens_count_where_they_came_whoever_they_are_of():
    early = row(0, 0.5, ttft=0.4, gap=0.2, tokens=3)  # at 0.9, 1.1, 1.3
    late = row(1, 1.9, ttft=0.05, gap=0.1, tokens=3)  # at 1.95, 2.05, 2.15

    assert Window(1.0, 2.0).tokens([early, late]) == 3


def test_an_event_of_several_tokens_counts_as_many():
    assert Window(0.0, 1.0).tokens([row(0, 0.5, ttft=0.0, gap=0.1, tokens=2, usage_tokens=6)]) == pytest.approx(6.0)


def test_a_queue_that_grows_with_its_waits_is_no_steady_state():
    overloaded = [row(n, n * 0.1, ttft=0.05 + 0.06 * n) for n in range(200)]
    at_ease = [row(n, n * 0.1, ttft=0.05) for n in range(200)]
    window = Window(0.0, 19.9)

    assert "under way grew from" in window.grows(overloaded)
    assert window.grows(at_ease) == ""
    assert window.grows([]) == ""


def test_throughput_counts_what_was_due_after_the_warm_up_and_ended_in_time():
    rows = [row(0, 0.2, first_byte_s=0.3), row(1, 1.0, first_byte_s=1.1), row(2, 1.5, first_byte_s=1.9), failed(3, 1.0)]
    run = run_of([*rows, row(4, 2.9, ttft=0.5)])
    found = throughput(run, warm_up_s=0.5, seconds=2.5)

    assert (found["requests"], found["errors"], found["kinds"], found["rps"]) == (2, 1, {"status 429": 1}, 0.8)
    assert (found["first_p50_ms"], found["first_p99_ms"]) == (pytest.approx(100.0), pytest.approx(400.0))
    assert found["generator_us_per_request"] == 100_000.0
    with pytest.raises(StageError, match=r"not one good answer: .*status 429.: 1"):
        throughput(run_of([failed(0, 1.0)]))
