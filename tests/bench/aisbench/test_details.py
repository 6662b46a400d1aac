"""What AISBench leaves, read from a run of the real one (3.1.20260630) against a server that failed in every way.

`recorded/mixed`: twelve requests and the warm-up's, whose kinds `KINDS` names; recorded with `known_server`.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from bench.aisbench.details import own_figures, read_requests, results_folder, said
from bench.aisbench.rows import Shape, run_of
from bench.workloads.requests import RequestSpec
from epd_serve.errors import StageError

MIXED = Path(__file__).parent / "recorded" / "mixed"
KINDS = ("ok", "status 429", "cut", "error event", "no done", "short", "garbage", "empty", "ok", "drop", "one", "ok")


def specs(count: int, tokens: int = 8) -> list[RequestSpec]:
    return [RequestSpec(f"r{n}", "?", (), tokens, 1, arrival_s=n / 4) for n in range(count)]


def test_every_request_of_a_real_run_is_read():
    sent = read_requests(MIXED)

    assert [one.row for one in sent] == list(range(13)), "by row, whatever the order in which they ended"
    assert [len(one.chunks_s) for one in sent] == [10, 10, 1, 0, 5, 10, 9, 0, 2, 10, 0, 3, 10]
    assert sent[1].output_tokens == 8 and sent[1].ttft_s == pytest.approx(0.05, abs=0.05)
    assert sent[3].error.startswith("After 1 retries, request failed with exception: ClientPayloadError")
    assert "\x1b" not in sent[7].error, "AISBench colours what it says"
    assert sum(one.success for one in sent) == 9, "by AISBench's count"


def test_only_whole_answers_count_as_good():
    """AISBench takes an error event before `[DONE]`, an empty and a short answer for successes."""
    run = run_of("1 rps", read_requests(MIXED), specs(12), Shape(0, 1))

    assert [(row.n, KINDS[row.n]) for row in run.rows if row.ok] == [(0, "ok"), (4, "no done"), (8, "ok"), (11, "ok")]
    assert [row.fault for row in run.rows] == [
        "", "status 429", "cut", "no usage", "", "short", "failed", "no usage", "", "unreachable", "short", ""
    ]  # fmt: skip
    whole = run.rows[0]
    assert len(whole.token_s) == whole.output_tokens == 8, "the usage is no token"
    assert run.rows[1].status == 429 and run.rows[1].ttft_s is None


def test_aisbenchs_own_figures_are_numbers_by_name():
    own = own_figures(MIXED)

    assert own["Total Requests"] == 13 and own["Success Requests"] == 9 and own["Failed Requests"] == 4
    assert own["TTFT/Average"] > 40 and own["TTFT/N"] == 9
    assert own["Request Throughput"] > 0 and "E2EL/P99" in own


def test_a_run_that_was_ended_is_read_from_its_temporary_files(tmp_path):
    (tmp_path / "tmp").mkdir()
    lines = (MIXED / "mm_custom_details.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "tmp" / "tmp_1.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:40])
    shutil.copy(next(MIXED.glob("db_data/*.db")), tmp_path / "tmp" / "tmp_2a6808f4.db")

    assert [one.row for one in read_requests(tmp_path)] == [0, 1, 2], "half a line is left out"
    assert own_figures(tmp_path) == {}


def test_times_that_were_not_written_are_said_to_be_missing(tmp_path):
    shutil.copy(MIXED / "mm_custom_details.jsonl", tmp_path)
    run = run_of("1 rps", read_requests(tmp_path), specs(12), Shape())

    assert run.rows[0].fault == "no times" and not any(row.ok for row in run.rows)


@pytest.fixture
def altered(tmp_path) -> Path:
    return Path(shutil.copytree(MIXED, tmp_path / "mixed"))


def replace_blob(folder: Path, blob: bytes) -> None:
    database = sqlite3.connect(next(folder.glob("db_data/*.db")))
    database.execute("UPDATE numpy_store SET arr_blob = ?", (blob,))
    database.commit()
    database.close()


def saved(array: np.ndarray, **how: bool) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


@pytest.mark.parametrize(
    ("blob", "what"),
    [
        (b"", "no array"),
        (b"\x93NUMPY garbage", "no array"),
        (pickle.dumps([1.0, 2.0]), "no array"),
        (saved(np.array([{"a": 1}], dtype=object), allow_pickle=True), "no array"),
        (saved(np.array([2.0, 1.0])), "no sequence of times"),
        (saved(np.array([1.0, np.nan])), "no sequence of times"),
        (saved(np.array([[1.0]])), "no sequence of times"),
        (saved(np.array([1, 2])), "no sequence of times"),
    ],
)
def test_a_blob_that_is_no_times_is_named_and_never_unpickled(altered, blob, what):
    replace_blob(altered, blob)

    with pytest.raises(StageError, match=what) as caught:
        read_requests(altered)
    assert "mm_custom_details.jsonl:1" in str(caught.value)


def test_a_line_that_is_none_is_named(altered):
    path = altered / "mm_custom_details.jsonl"
    path.write_bytes(b'{"id": 0, "success": true}\n{"id": "x"}\n')

    with pytest.raises(StageError, match=r"details.jsonl:2 is not as AISBench writes it"):
        read_requests(altered)


def test_a_database_outside_of_the_results_is_not_opened(altered):
    path = altered / "mm_custom_details.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**first, "db_name": "../../elsewhere.db"}) + "\n")

    with pytest.raises(StageError, match="is no name of a file"):
        read_requests(altered)


def test_a_folder_without_requests_is_said(tmp_path):
    with pytest.raises(StageError, match="left no request"):
        read_requests(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", '{"TTFT": 3}'])
def test_figures_that_are_none_are_named(altered, text):
    (altered / "mm_custom.json").write_text(text)

    with pytest.raises(StageError, match="figures cannot be read"):
        own_figures(altered)


def test_the_newest_run_is_taken(tmp_path):
    with pytest.raises(StageError, match="did not come to send anything"):
        results_folder(tmp_path)
    for name in ("20260101_000000", "20260102_000000"):
        (tmp_path / name / "performances" / "epd_bench").mkdir(parents=True)

    assert results_folder(tmp_path) == tmp_path / "20260102_000000" / "performances" / "epd_bench"


def test_the_last_error_of_the_logs_is_what_aisbench_says(tmp_path):
    log = tmp_path / "x.out"
    log.write_text(
        "INFO\nTraceback:\nais_bench.exceptions.AISBenchRuntimeError: [\x1b[1mTINFER-PARAM-005\x1b[0m]. memory usage "
        "too high: 88% | Visit https://somewhere for further help.\n"
    )

    assert said(tmp_path / "none", log) == "[TINFER-PARAM-005]. memory usage too high: 88%"
    assert said(tmp_path / "none") == ""
