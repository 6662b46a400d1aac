"""Figures of committed results follow from their rows: names and definitions stay what README and docs quote."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from bench.micro.colocation import figures as colocation
from bench.micro.ep import command as transfer_ep
from bench.micro.measurement import Row
from bench.micro.proxy import burst, irp, speed
from bench.record import ROOT


def of_parts(**figures: Callable[[Sequence[Row]], dict[str, float]]) -> Callable[[Sequence[Row]], dict[str, float]]:
    def joined(rows: Sequence[Row]) -> dict[str, float]:
        own = [of([row for row in rows if row["part"] == name]) for name, of in figures.items()]
        return {name: value for one in own for name, value in one.items()}

    return joined


RESULTS = {
    "colocation": (colocation.figures, 73),
    "proxy": (of_parts(speed=speed.figures, peers=speed.peer_figures, burst=burst.figures), 31),
    "proxy-irp": (irp.figures, 5),
    "transfer-ep": (transfer_ep.figures, 170),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_figures_of_a_committed_result_follow_from_its_rows(name):
    figures, count = RESULTS[name]
    saved = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())

    named = figures(saved["rows"])

    assert len(named) == count and named.keys() <= saved["figures"].keys()
    assert named == pytest.approx({figure: saved["figures"][figure] for figure in named}, rel=2e-3, abs=2e-3)
