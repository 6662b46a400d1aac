"""An experiment as a value: its runs, and whether another one is the same."""

from __future__ import annotations

import json

import msgspec

from bench.clients.measure import Rules
from bench.sweep.experiment import Experiment
from epd_serve.slo import Slo
from tests.bench.sweep.experiments import experiment


def test_rates_are_of_all_devices_together_unless_they_are_per_device():
    total, each = experiment("TP1x2,E-P-D"), experiment("TP1x2,E-P-D", per_device=True)

    assert [[run.rate_rps for run in total.runs(entry)] for entry in total.deployments] == [[1.0, 2.0], [1.0, 2.0]]
    assert [[run.rate_rps for run in each.runs(entry)] for entry in each.deployments] == [[2.0, 4.0], [3.0, 6.0]]
    assert [run.label for run in each.runs(each.deployments[1])] == ["3 rps", "6 rps"]
    assert [run.rate for run in each.runs(each.deployments[1])] == [1.0, 2.0]


def test_an_experiment_is_itself_again_when_it_is_read_from_a_file():
    asked = experiment(per_device=True, rules=Rules(late_ms=5.0), slos=(Slo(1, 2),), knobs={"reuse": 0.5})
    again = msgspec.json.decode(json.dumps(asked.to_json()), type=Experiment)

    assert again == asked
