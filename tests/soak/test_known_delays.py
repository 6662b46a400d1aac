"""The check of the generator against known delays. Speed is not asserted."""

from __future__ import annotations

import json

import pytest

from tests.bench.clients.made import row
from tests.soak import known_delays
from tests.soak.known_server import Known


def test_errors_are_the_distance_to_the_truth_on_either_side():
    known = Known(first_s=0.1, gap_s=0.02, tokens=3)
    early, late = row(ttft=0.098, gap=0.02), row(ttft=0.105, gap=0.021)
    written = [0.101, 0.121, 0.141]

    assert known_delays.errors_of(early, known, written)["ttft_error"] == pytest.approx(2.0)
    assert known_delays.errors_of(late, known, written)["ttft_error"] == pytest.approx(5.0)
    assert known_delays.errors_of(late, known, written)["tpot_error"] == pytest.approx(1.0)
    assert known_delays.errors_of(late, known, written)["ttft_error_to_written"] == pytest.approx(4.0)
    assert known_delays.errors_of(late, known, written)["tpot_error_to_written"] == pytest.approx(1.0)


def test_figures_are_means_and_percentiles():
    errors = [
        dict(zip(known_delays.ERRORS, values, strict=True)) for values in ((1.0, 0.1, 0.5, 0.0), (3.0, 0.3, 0.5, 0.0))
    ]
    figures = known_delays.error_figures(errors)

    assert (figures["ttft_error_ms"], figures["ttft_error_p50_ms"], figures["ttft_error_p99_ms"]) == (2.0, 1.0, 3.0)
    assert (figures["tpot_error_ms"], figures["ttft_error_to_written_ms"]) == (0.2, 0.5)


def test_the_check_runs_and_writes_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(known_delays, "KNOWN", (Known(first_s=0.02, gap_s=0.001, tokens=4, role_first=True),))
    monkeypatch.setattr(known_delays, "QUICK_S", 0.3)

    known_delays.SOAK.run(["--quick", "--json", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())
    assert {goal.figure for goal in known_delays.GOALS} <= set(found["figures"])
    assert {"n", "ttft_ms", "tpot_ms", "ttft_to_written_ms", "tpot_to_written_ms"} == set(found["rows"][0])
    assert len(found["rows"]) == found["figures"]["requests"] > 0
