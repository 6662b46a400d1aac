"""Workloads as traffic, and a recording as a workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cli import main
from bench.workloads.generate import Words
from bench.workloads.requests import RequestSpec
from bench.workloads.traffic import recorded, traffic_of
from epd_serve.traffic import Item, Request, read_traffic, write_traffic

ROWS = [
    Request("a", 0.0, 120, 7, (Item(100, 300, 200, key="k"), Item(16))),
    Request("b", 1.5, 103, 9, (Item(100, 300, 200, key="k"),)),
    Request("c", 2.0, 30, 2),
]


def test_a_recording_is_replayed_with_its_sizes_and_times(tmp_path: Path) -> None:
    write_traffic(tmp_path / "t", ROWS)
    first, second, text = recorded(tmp_path / "t", Words())
    assert [one.arrival_s for one in (first, second, text)] == [0.0, 1.5, 2.0]
    assert [(one.text_tokens, one.max_tokens) for one in (first, second, text)] == [(4, 7), (3, 9), (30, 2)]
    assert len(text.text.split()) == 30 and text.images == ()
    known, guessed = first.images
    assert (known.width, known.height) == (300, 200) and known == second.images[0], "an equal key is the same image"
    assert (guessed.width, guessed.height) == (112, 112)
    back = traffic_of(second, lambda width, height: 100)
    assert (back.prompt_tokens, back.output_tokens, back.items[0].tokens) == (103, 9, 100)


def test_any_workload_can_be_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["workload", "sharegpt4o-like", "--n", "20", "--rate", "2", "--export", "traffic", str(tmp_path)]
    assert main(words) == 0
    made = read_traffic(tmp_path / "traffic.jsonl")
    assert len(made) == 20 and all(len(one.items) == 1 and one.items[0].width for one in made)
    assert f"recorded:{tmp_path / 'traffic.jsonl'}" in capsys.readouterr().out
    again = ["workload", f"recorded:{tmp_path / 'traffic.jsonl'}"]
    assert main(again) == 0 and "20" in capsys.readouterr().out
    for wrong in ([], ["--concurrency", "2"]):
        assert main(["workload", "sharegpt4o-like", *wrong, "--export", "traffic", str(tmp_path)]) == 1
        assert "--rate R" in capsys.readouterr().err


def test_a_request_without_a_time_is_no_traffic() -> None:
    with pytest.raises(AssertionError):
        traffic_of(RequestSpec("a", "hello", (), 1, 1))
