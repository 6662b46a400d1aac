"""What `epd-bench duplicates` tells the second proxy, and how it counts."""

from __future__ import annotations

import json
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from bench.duplicates import encoders, recomputes
from epd_serve.wire import StoreReport
from proxy.store_metrics import StoreMetrics


def test_encodes_are_counted_from_the_round_s_beginning(tmp_path):
    stamps = [
        {"t": 1.0, "instance": "E0", "subject": "k", "event": "encoded"},
        {"t": 2.0, "instance": "E1", "subject": "k", "event": "encoded"},
        {"t": 2.1, "instance": "E0", "subject": "k", "event": "feature_put"},
    ]
    (tmp_path / "E.jsonl").write_text("".join(json.dumps(stamp) + "\n" for stamp in stamps))

    assert encoders(tmp_path, 1.5) == ["E1"]


def test_what_a_prefill_stage_recomputed_is_read_from_the_metrics():
    counters = {"recomputed.deadline": 2, "recomputed.corrupt": 1, "fetched": 7}
    report = StoreReport("P0", "life", 1, 0, 0, counters=counters)
    table = SimpleNamespace(snapshot=lambda: [SimpleNamespace(report=report)])
    registry = CollectorRegistry()
    registry.register(StoreMetrics(table))

    assert recomputes(generate_latest(registry).decode()) == 3
