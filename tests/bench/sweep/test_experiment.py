"""An experiment as a value: its runs, and whether another one is the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from bench.clients.slo import Slo
from bench.sweep.deployments import deployments
from bench.sweep.experiment import Experiment, RunLimits, difference
from tests.bench.sweep.experiments import experiment


def test_rates_are_of_all_devices_together_unless_they_are_per_device():
    total, each = experiment("TP1x2,E-P-D"), experiment("TP1x2,E-P-D", per_device=True)

    assert [[run.rate_rps for run in total.runs(entry)] for entry in total.deployments] == [[1.0, 2.0], [1.0, 2.0]]
    assert [[run.rate_rps for run in each.runs(entry)] for entry in each.deployments] == [[2.0, 4.0], [3.0, 6.0]]
    assert [run.label for run in each.runs(each.deployments[1])] == ["3 rps", "6 rps"]
    assert [run.rate for run in each.runs(each.deployments[1])] == [1.0, 2.0]


def test_an_experiment_is_itself_again_when_it_is_read_from_a_file():
    asked = experiment(per_device=True, limits=RunLimits(late_ms=5.0), slos=(Slo(1, 2),), knobs={"reuse": 0.5})
    again = Experiment.from_json(json.loads(json.dumps(asked.to_json())))

    assert again == asked and difference(asked.to_json(), again.to_json()) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rates": (1.0, 3.0)}, r"rates is \[1.0, 2.0\] there and \[1.0, 3.0\] here"),
        ({"seed": 7}, "seed is 0 there and 7 here"),
        ({"slos": (Slo(1, 2),)}, r"slos is \[\"2000:50\", .*\] there and \[\"1:2\"\] here"),
        ({"per_device": True}, "per_device is false there and true here"),
        ({"knobs": {"reuse": 0.5}}, "knobs/reuse is not recorded there and 0.5 here"),
        ({"deployments": deployments("TP1x2")}, r"deployments/\(E-P\)-D/name is .* there and not recorded here"),
        ({"deployments": deployments("TP1x2,(E-P)-D", flags=("--x",))}, r"deployments/TP1x2/flags is \[\] there"),
        ({"limits": RunLimits(late_ms=5.0)}, "limits/late_ms is 100.0 there and 5.0 here"),
    ],
)
def test_the_field_that_differs_is_named(change, said):
    before = experiment()

    assert re.search(said, difference(before.to_json(), replace(before, **change).to_json()))
