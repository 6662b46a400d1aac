"""An experiment as a value: its runs, and whether another one is the same."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bench.client.slo import Slo
from bench.layouts.entry import entries
from bench.layouts.experiment import difference
from tests.bench.layouts.asked import experiment


def test_rates_are_of_all_devices_together_unless_they_are_per_device():
    total, each = experiment("TP1x2,E-P-D"), experiment("TP1x2,E-P-D", per_device=True)

    assert [[run.rate_rps for run in total.runs(entry)] for entry in total.entries] == [[1.0, 2.0], [1.0, 2.0]]
    assert [[run.rate_rps for run in each.runs(entry)] for entry in each.entries] == [[2.0, 4.0], [3.0, 6.0]]
    assert [run.label for run in each.runs(each.entries[1])] == ["3 rps", "6 rps"]
    assert [run.rate for run in each.runs(each.entries[1])] == [1.0, 2.0]


def test_an_experiment_equals_itself_read_from_a_file():
    assert difference(experiment().to_json(), experiment().to_json()) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rates": (1.0, 3.0)}, r"rates is \[1.0, 2.0\] there and \[1.0, 3.0\] here"),
        ({"seed": 7}, "seed is 0 there and 7 here"),
        ({"slos": (Slo(1, 2),)}, "slos is"),
        ({"per_device": True}, 'rates_are is "total" there and "per_device" here'),
        ({"knobs": {"reuse": 0.5}}, "knobs.reuse is not recorded there and 0.5 here"),
        ({"entries": entries("TP1x2")}, r"entries are TP1x2, \(E-P\)-D there and TP1x2 here"),
        ({"entries": entries("TP1x2,(E-P)-D", flags=("--x",))}, r"entries.TP1x2.flags is \[\] there"),
    ],
)
def test_the_field_that_differs_is_named(change, said):
    before = experiment()

    assert re.search(said, difference(before.to_json(), replace(before, **change).to_json()))
