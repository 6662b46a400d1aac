"""What decodes feel of features that arrive, from gaps; and stages that run."""

from __future__ import annotations

import argparse

import pytest

from bench.micro.ep.decode_gaps import KINDS, figures, measure


def test_gaps_beside_features_are_compared_with_those_alone_by_medians():
    gaps_ms = {"alone": (2.0, 2.0, 9.0), "encoding": (2.1, 2.1, 2.1), "beside": (2.2, 2.2, 30.0)}
    rows = [{"kind": kind, "gap_p99_ms": one} for kind, own in gaps_ms.items() for one in own]

    found = figures(rows)
    assert found["decode_gap_p99_beside_features"] == pytest.approx(1.1)
    assert found["decode_gap_p99_beside_encoding"] == pytest.approx(1.05)


def test_what_a_client_sees_is_told_apart_from_the_steps():
    rows = [{"kind": kind, "gap_p99_ms": 2.0, "token_gap_p99_ms": ms} for kind, ms in (("alone", 2.0), ("beside", 5.0))]

    found = figures(rows)
    assert found["decode_gap_p99_beside_features"] == 1.0
    assert found["token_gap_p99_beside_features"] == 2.5


def test_one_kind_alone_is_compared_with_nothing():
    assert figures([{"kind": "alone", "gap_p99_ms": 2.0}]) == {"decode_gap_p99_ms_alone": 2.0}


@pytest.mark.slow
@pytest.mark.e2e
def test_gaps_of_a_stage_that_runs():
    rows = list(measure(argparse.Namespace(rounds=1, budget_s=60.0)))

    assert {row["kind"] for row in rows} == {*KINDS}
    assert all(row["gap_p99_ms"] > 0 and row["gaps"] > 10 for row in rows)
