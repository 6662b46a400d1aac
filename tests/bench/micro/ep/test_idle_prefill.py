"""What a request waits for its feature at an idle P, from stamps and from pairs of requests; and stages that run."""

from __future__ import annotations

import argparse

import pytest

from bench.micro.ep.idle_prefill import SIDES, admission_s, copy_in_step_s, figures, measure
from epd_serve.errors import StageError
from epd_serve.phases.stamps import Stamp


def stamps(**seconds: float) -> list[Stamp]:
    """By instance and event, oldest first."""
    at = sorted((t, *name.split("_", 1)) for name, t in seconds.items())
    return [Stamp(t, instance, "request", event, {}) for t, instance, event in at]


def test_a_request_that_waits_already_is_late_by_what_passes_from_the_end_of_encoding_to_its_first_step():
    assert admission_s(stamps(PD0_queued=1.0, E0_encoded=2.0, PD0_scheduled=2.25)) == 0.25


def test_before_it_is_in_the_scheduler_a_request_waits_for_no_feature():
    assert admission_s(stamps(E0_encoded=1.0, PD0_queued=2.0, PD0_scheduled=2.25)) == 0.25


def test_of_a_feature_that_is_here_there_is_no_encoding_and_later_steps_count_for_nothing():
    own = stamps(PD0_queued=1.0, PD0_scheduled=1.5)

    assert admission_s([*own, Stamp(9.0, "PD0", "request", "scheduled", {})]) == 0.5


def test_a_request_without_stamps_is_an_error():
    with pytest.raises(StageError, match="scheduled"):
        admission_s(stamps(PD0_queued=1.0))


def test_exposed_is_what_a_request_waits_longer_than_the_same_one_with_its_feature_here():
    pairs = [(9.0, 2.0), (10.0, 2.0), (50.0, 1.0)]
    rows = [
        {"picture": "4k", "round": n, "admission_ms": new, "local_ms": again} for n, (new, again) in enumerate(pairs)
    ]

    assert figures(rows) == {"exposed_ms_4k": 8.0, "admission_ms_4k": 10.0, "local_ms_4k": 2.0}


def test_what_a_request_waits_beyond_one_copy_is_exposed_to_the_slab():
    rows = [
        {"picture": "4k", "round": n, "admission_ms": new, "local_ms": 2.0, "memcpy_ms": 3.0, "copy_ms": 0.1}
        for n, new in enumerate((9.0, 10.0, 50.0))
    ]

    named = figures(rows)

    assert (named["exposed_ms_4k"], named["exposed_ms_slab_4k"], named["copy_in_step_ms_4k"]) == (8.0, 5.0, 0.1)


def test_a_copy_in_the_step_takes_from_its_beginning_to_its_end_at_the_stage_that_reads():
    loaded = [Stamp(t, name, "key", "feature_loaded", {"t0": t - 0.5}) for t, name in ((1.0, "E0"), (3.0, "PD0"))]

    assert copy_in_step_s([*loaded, Stamp(9.0, "PD0", "key", "feature_loaded", {"t0": 1.0})]) == 0.5
    with pytest.raises(StageError, match="loaded"):
        copy_in_step_s(loaded[:1])


@pytest.mark.slow
@pytest.mark.e2e
def test_pairs_of_requests_on_real_stages():
    rows = list(measure(argparse.Namespace(rounds=1, budget_s=60.0)))

    assert {row["picture"] for row in rows} == SIDES.keys()
    assert all(0 < row["local_ms"] < row["admission_ms"] and row["copy_ms"] < row["memcpy_ms"] for row in rows)
