"""Phase stamps: one JSON line each, whoever writes."""

from __future__ import annotations

import json
from pathlib import Path

from epd_serve.trace import Trace


def test_stamps_of_two_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for name in ("P0", "D0"):
        Trace(str(path), name).stamp("t", "kv_done", ok=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["instance"], line["subject"], line["event"], line["ok"]) for line in lines] == [
        ("P0", "t", "kv_done", True),
        ("D0", "t", "kv_done", True),
    ]
    assert lines[0]["t"] <= lines[1]["t"]


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    Trace("", "P0").stamp("t", "e")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_loses_stamps_and_nothing_else() -> None:
    Trace("/dev/full", "P0").stamp("t", "kv_first")
