"""Rows on disk outlive whatever ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.client.rows_file import RowsFile, read_rows
from epd_serve.errors import ConfigError
from tests.bench.client.rows import row


def test_each_row_is_on_disk_at_once(tmp_path):
    with RowsFile(tmp_path / "deep" / "r.jsonl") as file:
        file.keep(row(0))
        assert [one.n for one in read_rows(tmp_path / "deep" / "r.jsonl")] == [0]
        file.keep(row(1))
    assert [one.n for one in read_rows(tmp_path / "deep" / "r.jsonl")] == [0, 1]


def test_half_a_line_at_the_end_is_left_out(tmp_path):
    path = tmp_path / "r.jsonl"
    with RowsFile(path) as file:
        file.keep(row(0))
    with path.open("ab") as more:
        more.write(b'{"run": "r", "n"')

    assert [one.n for one in read_rows(path)] == [0]


def test_a_line_that_is_no_row_is_named(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"n": 3}\n')

    with pytest.raises(ConfigError, match=r"r\.jsonl:1 is no row"):
        read_rows(tmp_path / "r.jsonl")


def test_a_full_disk_says_how_many_rows_there_are():
    with RowsFile(Path("/dev/full")) as file, pytest.raises(ConfigError, match="No space left on device; 0 rows"):
        file.keep(row(0))


@pytest.mark.parametrize("name", [".", "a-file/r.jsonl"])
def test_a_place_that_cannot_be_written_is_known_before_the_run(tmp_path, name):
    (tmp_path / "a-file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        RowsFile(tmp_path / name)


def test_rows_of_a_resumed_measurement_follow_those_that_are_there(tmp_path):
    for number in range(2):
        with RowsFile(tmp_path / "r.jsonl", append=True) as file:
            file.keep(row(number))

    assert [one.n for one in read_rows(tmp_path / "r.jsonl")] == [0, 1]
