"""`epd-bench model-check` on real stages: what an owner of weights would run, over the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli import main
from tests.e2e.serving import Endpoint, Serving

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True)
def test_a_model_is_held_against_plain_vllm_in_one_file(launch: Serving, monolith: Endpoint, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    assert main(["model-check", launch.url, monolith.url, "--quick", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    asked = {row["question"]: row for row in result["rows"] if "question" in row}
    for name in ("text", "image", "another image", "the image again", "two images"):
        assert asked[name]["verdict"] in ("equal", "equal until a near tie"), asked[name]
    assert asked["video"]["verdict"] == asked["audio"]["verdict"] == "refused by both"
    assert asked["image"]["answers"]["ours"]["text"], "the demo model says what it sees"
    held = result["env"]["memory"]
    assert set(held["ours"]["kv_tokens"]) == {"E0 (E)", "P0 (P)", "D0 (D)"}
    assert all(tokens > 0 for tokens in held["plain"]["kv_tokens"].values()) and held["plain"]["kv_tokens"]
    assert held["ours"]["host_mib"] > held["plain"]["host_mib"] > 500
    assert launch.settled_counters("E0").get("encoded", 0) > 0, "images went through E"
