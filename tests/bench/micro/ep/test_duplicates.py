"""Duplicates behind two proxies: what the second one is told, how encodes are counted, and real stages."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from bench.micro.ep import duplicates
from bench.micro.ep.duplicates import GOALS, encodes, figures, measure
from bench.served import Served, Stage
from deploy.alone.stages import read_stages_file
from epd_serve.wire import StoreReport
from proxy.registry.stage_metrics import StageMetrics, store_metrics


def test_the_second_proxy_reads_what_it_is_told_of_the_stages(tmp_path, monkeypatch):
    stages = tuple(Stage(f"{role}0", role, f"{role}0.http") for role in "EPD")
    launch = Served("E-P-D", "http://proxy", "m", {}, 1.0, stages, tmp_path, tmp_path)
    instances = {
        "instances": [
            {"id": stage.instance, "incarnation": f"incarnation of {stage.role}", "devices": [1], "cpu_cores": [0, 1]}
            for stage in stages
        ]
    }
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(200, json=instances))
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(duplicates.stages_file(launch)))

    read = read_stages_file(str(file))

    assert {one.id: one.kv_endpoint for one in read.instances} == {
        "E0": None,
        "P0": f"ipc://{tmp_path}/P0.kv",
        "D0": None,
    }
    assert [one.load_news for one in read.instances] == [f"ipc://{tmp_path}/{role}0.load" for role in "EPD"]
    assert {(one.devices, one.cpu_cores) for one in read.instances} == {((1,), (0, 1))}
    assert [one.incarnation for one in read.instances] == ["incarnation of E", "incarnation of P", "incarnation of D"]


def test_what_was_encoded_and_recomputed_is_read_from_the_metrics_by_instance():
    counters = {
        "E1": {"encoded": 4, "encode_skipped": 9},
        "P0": {"recomputed.deadline": 2, "recomputed.corrupt": 1, "fetched": 7},
    }
    reports = [StoreReport(name, "incarnation", 1, 0, 0, counters=own) for name, own in counters.items()]
    table = SimpleNamespace(snapshot=lambda: [SimpleNamespace(report=report) for report in reports])
    registry = CollectorRegistry()
    registry.register(StageMetrics(table, store_metrics))

    assert encodes(generate_latest(registry).decode()) == {"E1": 4, "P0": 3}


def test_the_worst_round_counts():
    rows = [{"clients": 64, "encodes": count, "encodes_when_known": known} for count, known in ((1, 0), (2, 1), (1, 0))]

    assert figures(rows) == {"encodes_for_64_duplicates": 2, "encodes_for_a_known_feature": 1}


@pytest.mark.slow
@pytest.mark.e2e
def test_duplicates_through_two_proxies_are_encoded_once():
    named = figures(list(measure(argparse.Namespace(rounds=3))))

    assert [goal.figure for goal in GOALS if not goal.met(named[goal.figure])] == []
