"""What `epd-bench duplicates` tells the second proxy, and how it counts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from bench import duplicates
from bench.duplicates import encoders, recomputes
from bench.served import Served, Stage
from deploy.alone import read_stages_file
from epd_serve.wire import StoreReport
from proxy.registry.stage_metrics import StoreMetrics


def test_encodes_are_counted_from_the_round_s_beginning(tmp_path):
    stamps = [
        {"t": 1.0, "instance": "E0", "subject": "k", "event": "encoded"},
        {"t": 2.0, "instance": "E1", "subject": "k", "event": "encoded"},
        {"t": 2.1, "instance": "E0", "subject": "k", "event": "feature_put"},
    ]
    (tmp_path / "E.jsonl").write_text("".join(json.dumps(stamp) + "\n" for stamp in stamps))

    assert encoders(tmp_path, 1.5) == ["E1"]


def test_the_second_proxy_reads_what_it_is_told_of_the_stages(tmp_path, monkeypatch):
    stages = tuple(Stage(f"{role}0", role, 8000 + number) for number, role in enumerate("EPD"))
    launch = Served("E-P-D", "http://proxy", "m", {}, 1.0, 1.0, stages, tmp_path, tmp_path)
    lives = {"instances": [{"id": stage.instance, "incarnation": f"life of {stage.role}"} for stage in stages]}
    monkeypatch.setattr(duplicates.httpx, "get", lambda url, **_: httpx.Response(200, json=lives))
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(duplicates.stages_file(launch)))

    read = read_stages_file(str(file))

    assert {one.id: one.kv_endpoint for one in read.instances} == {
        "E0": None,
        "P0": f"ipc://{tmp_path}/P0.kv",
        "D0": None,
    }
    assert [one.incarnation for one in read.instances] == ["life of E", "life of P", "life of D"]


def test_what_a_prefill_stage_recomputed_is_read_from_the_metrics():
    counters = {"recomputed.deadline": 2, "recomputed.corrupt": 1, "fetched": 7}
    report = StoreReport("P0", "life", 1, 0, 0, counters=counters)
    table = SimpleNamespace(snapshot=lambda: [SimpleNamespace(report=report)])
    registry = CollectorRegistry()
    registry.register(StoreMetrics(table))

    assert recomputes(generate_latest(registry).decode()) == 3
