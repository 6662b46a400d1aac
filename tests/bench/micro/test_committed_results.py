"""Figures of committed results follow from their rows: names and definitions stay what README and docs quote."""

from __future__ import annotations

import json

import pytest

from bench.micro.ep import command as transfer_ep
from bench.papers import encoder_free, real_tables
from bench.proxy import command as proxy
from bench.record import ROOT
from tests.soak import placement

RESULTS = {
    "memory-tables": (encoder_free.figures, 40),
    "memory-tables-real": (real_tables.figures, 29),
    "proxy-speed": (proxy.figures, 21),
    "proxy-irp": (placement.figures, 5),
    "proxy-pressure": (proxy.figures, 8),
    "proxy-deadlines": (proxy.figures, 8),
    "transfer-ep": (transfer_ep.figures, 86),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_figures_of_a_committed_result_follow_from_its_rows(name):
    figures, count = RESULTS[name]
    saved = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())

    named = figures(saved["rows"])

    assert len(named) == count and named.keys() <= saved["figures"].keys()
    assert named == pytest.approx({figure: saved["figures"][figure] for figure in named}, rel=2e-3, abs=2e-3)
