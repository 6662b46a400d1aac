"""`epd-bench model-check` over simulated stages: two servers, one after the other, a time that is too short."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.model_check.items import QUESTIONS, unmade
from bench.served import Served, simulated


@pytest.fixture(scope="module")
def stages() -> Iterator[Served]:
    with simulated("TP1") as launch:
        yield launch


def checked(path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["model-check", *flags, "--requests", "1", "--json", str(path)])
    return code, json.loads(path.read_text())


@pytest.mark.slow
def test_answers_times_and_memory_of_both_are_in_one_file(stages: Served, tmp_path: Path) -> None:
    code, result = checked(tmp_path / "r.json", stages.url, stages.url)
    verdicts = {row["question"]: row["verdict"] for row in result["rows"] if "question" in row}
    assert code == 0
    assert set(verdicts) == {question.name for question in QUESTIONS}
    assert {name for name, verdict in verdicts.items() if verdict != "equal"} <= (
        {"video", "image and video"} if unmade() else set()
    )
    assert result["figures"]["ttft_over_plain/new image"] > 0
    held = result["env"]["memory"]
    assert held["ours"]["kv_tokens"] == held["plain"]["kv_tokens"] != {}
    assert held["ours"]["host_mib"] > 50, "its processes are on this host"


@pytest.mark.slow
def test_a_server_may_be_asked_later_than_the_other(stages: Served, tmp_path: Path) -> None:
    assert checked(tmp_path / "plain.json", stages.url)[0] == 0
    code, result = checked(tmp_path / "r.json", stages.url, str(tmp_path / "plain.json"))
    assert code == 0
    assert result["figures"]["answers/equal"] >= 7
    assert result["figures"]["ttft_over_plain/text"] > 0


@pytest.mark.slow
def test_a_wrong_answer_is_exit_code_1(stages: Served, tmp_path: Path) -> None:
    checked(tmp_path / "plain.json", stages.url)
    plain = json.loads((tmp_path / "plain.json").read_text())
    plain["rows"][0]["answers"]["ours"]["tokens"][0] += 1
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    code, result = checked(tmp_path / "r.json", stages.url, str(tmp_path / "plain.json"))
    assert code == 1
    assert result["figures"]["answers/different"] == 1


@pytest.mark.slow
def test_what_the_time_does_not_suffice_for_is_missing(stages: Served, tmp_path: Path) -> None:
    code, result = checked(tmp_path / "r.json", stages.url, stages.url, "--limit", "0")
    assert code == 1
    assert "failed" in {row["verdict"] for row in result["rows"] if row.get("why") == "the time was over"}


def test_a_comparison_is_not_what_a_later_run_is_held_against(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.json").write_text('{"figures": {}, "env": {}, "rows": []}')
    assert main(["model-check", "http://127.0.0.1:9", str(tmp_path / "r.json")]) == 1
