"""The files of one entry: what is finished stays, what is not goes when it is measured again."""

from __future__ import annotations

import json
import os

import pytest

from bench.layouts.book import BATCHES, PHASES, RESULT, ROWS, Book
from epd_serve.errors import ConfigError
from tests.bench.layouts.asked import ENV, experiment, run_row

EXPERIMENT = experiment()
ENTRY = EXPERIMENT.entries[0]


def runs_in(path):
    return [json.loads(line)["run"] for line in path.read_text().splitlines()]


def test_a_run_is_finished_when_the_result_has_it(tmp_path):
    book = Book(tmp_path / "e", ENTRY)
    assert [run.label for run in book.missing(EXPERIMENT.runs(ENTRY))] == ["1 rps", "2 rps"]

    book.began(ENV)
    book.keep(run_row("1 rps"), {"1 rps/ok": 3.0})

    again = Book(tmp_path / "e", ENTRY)
    assert [run.label for run in again.missing(EXPERIMENT.runs(ENTRY))] == ["2 rps"]
    assert again.figures == {"1 rps/ok": 3.0}


def test_what_an_unfinished_run_left_stays_until_it_is_measured_again(tmp_path):
    book = Book(tmp_path, ENTRY)
    book.began(ENV)
    book.keep(run_row("1 rps"), {})
    for name in (ROWS, PHASES, BATCHES):
        (tmp_path / name).write_text('{"run":"1 rps"}\n{"run":"2 rps"}\n{"run":"2 r')

    again = Book(tmp_path, ENTRY)
    assert (tmp_path / ROWS).read_text().count("2 rps") == 1
    again.began(ENV)

    assert [runs_in(tmp_path / name) for name in (ROWS, PHASES, BATCHES)] == [["1 rps"]] * 3


def test_each_session_is_remembered_with_the_load_that_it_met(tmp_path):
    for load in (0.1, 1.5):
        book = Book(tmp_path, ENTRY)
        book.began({**ENV, "machine": {"load_average_1min": load}})
        book.keep(run_row(f"{load} rps"), {})

    assert [one["load_average_1min"] for one in Book(tmp_path, ENTRY).env["sessions"]] == [0.1, 1.5]


def test_a_failure_is_kept_until_the_next_session(tmp_path):
    book = Book(tmp_path, ENTRY)
    assert book.failure == ""
    book.failed("PD0 did not start: no memory")
    assert Book(tmp_path, ENTRY).failure == "PD0 did not start: no memory"
    book.began(ENV)
    assert Book(tmp_path, ENTRY).failure == ""


def test_a_result_that_cannot_be_written_is_told_and_the_one_before_it_stays(tmp_path):
    book = Book(tmp_path, ENTRY)
    book.keep(run_row("1 rps"), {})
    before = (tmp_path / RESULT).read_bytes()
    (tmp_path / f".{RESULT}.{os.getpid()}").mkdir()  # a disk that is full says no as well

    with pytest.raises(ConfigError, match="what was there before is kept"):
        book.keep(run_row("2 rps"), {})
    assert (tmp_path / RESULT).read_bytes() == before


def test_a_broken_result_is_named_with_the_way_out(tmp_path):
    (tmp_path / RESULT).write_text("{")
    with pytest.raises(ConfigError, match=r"result\.json cannot be read .* --fresh"):
        Book(tmp_path, ENTRY)
    (tmp_path / RESULT).write_text("{}")
    with pytest.raises(ConfigError, match="it has no 'figures'"):
        Book(tmp_path, ENTRY)


def test_answers_are_kept_for_those_that_come_later(tmp_path):
    Book(tmp_path, ENTRY).keep_answers([[1, 2], [3]])
    assert Book(tmp_path, ENTRY).answers == [[1, 2], [3]]
