"""What stages run while they are loaded, and that a stage which was lost is noticed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench.sweep.running import Sampler, StageStatus
from epd_serve.errors import ConfigError
from tests.waiting import wait_for


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_each_stage_runs_is_written_down_with_its_time(tmp_path):
    def look():
        return [StageStatus("P0", "P", "a", running=2, waiting=1), StageStatus("D0", "D", "b", running=7)]

    begun = time.perf_counter()
    with Sampler(look, tmp_path / "b.jsonl", "2 rps") as sampler:
        wait_for(lambda: len(lines(tmp_path / "b.jsonl")) >= 4)

    found = lines(tmp_path / "b.jsonl")
    assert {key: found[0][key] for key in found[0] if key != "t_s"} == {
        "run": "2 rps",
        "instance": "P0",
        "role": "P",
        "running": 2,
        "waiting": 1,
    }
    assert begun <= found[0]["t_s"] <= time.perf_counter(), "the clock that rows have"
    assert sampler.died == {}


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (StageStatus("P0", "P", "b"), "it was restarted"),
        (StageStatus("P0", "P", "a", down="killed"), "killed"),
    ],
)
def test_a_stage_that_was_lost_is_noticed_even_at_the_very_end(tmp_path, later, why):
    now = [StageStatus("P0", "P", "a")]
    with Sampler(lambda: now, tmp_path / "b.jsonl", "2 rps") as sampler:
        wait_for(lambda: lines(tmp_path / "b.jsonl"))
        now[0] = later
    assert sampler.died["P0"].startswith(why)


def test_nobody_who_answers_is_no_sample(tmp_path):
    asked = []

    def look():
        asked.append(1)
        raise ConnectionRefusedError

    with Sampler(look, tmp_path / "b.jsonl", "2 rps") as sampler:
        wait_for(lambda: asked)
    assert sampler.died == {} and lines(tmp_path / "b.jsonl") == []


def test_a_full_disk_is_told_at_the_end():
    with (
        pytest.raises(ConfigError, match="No space left on device"),
        Sampler(lambda: [StageStatus("P0", "P", "a")], Path("/dev/full"), "2 rps"),
    ):
        pass
