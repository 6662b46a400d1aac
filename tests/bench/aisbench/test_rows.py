"""From AISBench's records to rows: when a request was due, which chunks are tokens."""

from __future__ import annotations

import pytest

from bench.aisbench.details import Sent
from bench.aisbench.rate import judged
from bench.aisbench.rows import Shape, run_of
from bench.clients.measure import Plan
from bench.clients.results import Outcome
from bench.clients.slo import PAPER
from bench.clients.sweep import run_text
from bench.workloads.requests import Poisson, RequestSpec


def spec(n: int, arrival_s: float | None) -> RequestSpec:
    return RequestSpec(f"r{n}", "?", (), 2, 1, arrival_s=arrival_s)


def sent(row: int, *chunks_s: float, **more: object) -> Sent:
    given = {"uuid": f"u{row}", "success": True, "error": "", "input_tokens": 3, "output_tokens": 2, **more}
    return Sent(row=row, chunks_s=chunks_s, **given)  # type: ignore[arg-type]


def test_a_request_is_due_when_the_schedule_said_so():
    """The one that AISBench sent the most promptly says where the schedule begins."""
    records = [sent(0, 0.0, 1.0), sent(1, 10.5, 10.7, 10.8, 10.8), sent(2, 11.6, 11.7, 11.8, 11.8)]
    run = run_of("1 rps", records, [spec(0, 0.5), spec(1, 1.5)], Shape(0, 1))

    assert [row.due_s for row in run.rows] == pytest.approx([10.5, 11.5])
    assert [row.ttft_s for row in run.rows] == pytest.approx([0.2, 0.2]), "of the second 0.1 s by AISBench"
    assert [row.late_s for row in run.rows] == pytest.approx([0.0, 0.1])
    assert (run.begun_s, run.issued_s, run.ended_s) == pytest.approx((10.5, 11.5, 11.8))


def test_a_role_only_chunk_is_no_token():
    records = [sent(1, 10.0, 10.003, 10.2, 10.3, 10.3)]

    (theirs,) = run_of("r", records, [spec(0, 0.0)], Shape(0, 1)).rows
    (ours,) = run_of("r", records, [spec(0, 0.0)], Shape(1, 1)).rows
    assert records[0].ttft_s == theirs.ttft_s == pytest.approx(0.003)
    assert ours.ttft_s == pytest.approx(0.2) and ours.tpot_s == pytest.approx(0.1)
    assert len(ours.token_s) == 2


def test_a_run_that_was_ended_is_as_long_as_what_it_sent():
    left = sent(2, success=False, error="Request cancelled by user")
    run = run_of("r", [sent(1, 10.0, 10.2, 10.3, 10.3), left], [spec(n, float(n)) for n in range(9)], Shape())

    assert [row.outcome for row in run.rows] == [Outcome.OK, Outcome.CANCELLED]
    assert run.issued_s - run.begun_s == 1.0


def test_a_run_of_which_only_the_warm_up_is_there_says_so():
    run = run_of("r", [sent(0, 1.0, 2.0, 3.0)], [spec(0, 0.0)], Shape())
    run.stopped = "interrupted"
    measured = judged(run, Plan(Poisson(1.0), count=1))

    assert [one.text for one in measured.objections] == ["interrupted", "not one good answer among 0 requests"]
    assert "0 of 0 requests" in run_text(measured, PAPER)
    assert measured.row()["valid"] is False
