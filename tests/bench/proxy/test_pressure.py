"""What the figures under pressure are made of."""

from __future__ import annotations

import pytest

from bench.clients.results import Outcome, RequestRecord
from bench.proxy.door_cost import costs
from bench.proxy.pressure import computed_within, counted, dues, figures


def record(first_byte_s: float | None, outcome: Outcome = Outcome.OK) -> RequestRecord:
    return RequestRecord("", 0, "", "", 0.0, 0.0, 20.0, outcome, first_byte_s=first_byte_s)


def test_every_run_offers_as_many_requests_at_other_moments() -> None:
    one, other = dues(10.4, 5.0, "a"), dues(10.4, 5.0, "b")
    assert len(one) == len(other) == 10 and one != other and one == dues(10.4, 5.0, "a")
    assert one == sorted(one) and one[0] >= 0 and one[-1] <= 5.0


@pytest.mark.parametrize(("first_byte_s", "within_s"), [(5.0, 2.0), (10.5, 1.5), (1.5, 0.5), (0.9, 0.0), (13.0, 0.0)])
def test_of_a_prompt_counts_what_was_computed_within_the_window(first_byte_s: float, within_s: float) -> None:
    assert computed_within(record(first_byte_s), 2.0, 1.0, 10.0) == within_s


def test_a_prompt_without_an_answer_was_not_computed() -> None:
    assert computed_within(record(5.0, Outcome.ERROR), 2.0, 1.0, 10.0) == 0.0
    assert counted([record(5.0), record(None, Outcome.ERROR)])["bad"] == 1


def test_figures_compare_orders_at_what_can_be_encoded_and_a_tenant_with_itself_alone() -> None:
    waits = {"requests": 1, "bad": 0, "first_p50_ms": 1.0, "first_p90_ms": 1.0}
    judged = [
        {"order": order, "load": load, "attained": share, **waits, "first_p99_ms": 1.0, "first_p100_ms": longest}
        for order, load, share, longest in (
            ("fcfs", 1.0, 0.25, 4.0),
            ("deadline", 1.0, 0.5, 5.0),
            ("fcfs", 1.2, 0.0, 9.0),
        )
    ]
    tenants = [
        {"tenant": "quiet", "when": when, "round": 0, **waits, "first_p99_ms": p99}
        for when, p99 in (("alone", 100.0), ("beside", 120.0))
    ]
    parts = {
        "pressure-mixed": [
            {"kind": "short alone", **waits, "first_p99_ms": 100.0},
            {"kind": "short", "utilisation": 0.8, **waits, "first_p99_ms": 150.0},
            {"kind": "long", "utilisation": 0.8, **waits, "first_p99_ms": 1000.0},
        ],
        "pressure-deadlines": judged,
        "pressure-real": judged,
        "pressure-cost": [{"what": "decided", "us": 25.0}, {"what": "undecided", "us": 10.0}],
        "pressure-videos": [
            {"kind": kind, "when": when, **waits, "first_p99_ms": p99}
            for kind, when, p99 in (
                ("text", "alone", 10.0),
                ("text", "beside", 11.0),
                ("small", "alone", 100.0),
                ("small", "beside", 140.0),
            )
        ],
        "pressure-tenants": tenants,
    }
    found = figures(parts)
    assert found["slo_points_over_fcfs"] == 25.0 and found["slo_attained_fcfs_1.2"] == 0.0
    assert (found["slo_points_over_fcfs_real"], found["longest_over_fcfs"]) == (25.0, 1.25)
    assert (found["prefill_utilisation_mixed"], found["short_prompt_p99_ratio"]) == (0.8, 1.5)
    assert (found["admission_us"], found["decisions_us"]) == (25.0, 15.0)
    assert (found["small_beside_video_p99_ratio"], found["other_tenant_p99_ratio"]) == (1.4, 1.2)
    assert not figures({})


def test_a_request_costs_time_with_decisions_and_without() -> None:
    rows = list(costs(rounds=1, requests=20))
    assert [row["what"] for row in rows] == ["decided", "undecided"] and all(row["us"] > 0 for row in rows)
