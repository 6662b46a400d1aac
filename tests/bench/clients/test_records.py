"""Records: what is measured of a request, and that a file gives back what it was given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.clients.results import Outcome, RecordsFile, RequestRecord, read_records
from epd_serve.errors import ConfigError
from tests.bench.clients.made import failed, row


def test_times_count_from_when_a_request_was_due():
    one = row(due=10.0, ttft=0.5, gap=0.02, tokens=4, ready_s=10.1)

    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.02)
    assert one.itl_s == pytest.approx([0.02] * 3)
    assert one.e2e_s == pytest.approx(0.56)
    assert one.late_s == pytest.approx(0.1)


def test_tokens_are_the_servers_count_where_events_carry_several():
    one = row(ttft=0.1, gap=0.02, tokens=3, usage_tokens=5)

    assert one.tpot_s == pytest.approx(0.04 / 4)
    assert row(tokens=3, usage_tokens=None).output_tokens == 3


def test_an_answer_of_one_token_has_no_time_per_token():
    assert row(tokens=1).tpot_s is None
    assert failed().ttft_s is None


@pytest.mark.parametrize("one", [row(3, 7.25), failed(1, 2.5)])
def test_a_row_comes_back_from_its_json(one):
    assert msgspec.json.decode(msgspec.json.encode(one), type=RequestRecord) == one


def test_a_failure_never_counts_as_quick():
    good = row(due=1.0, first_byte_s=1.5)

    assert good.wait_s() == 0.5
    assert row(due=1.0, first_byte_s=1.5, outcome=Outcome.TRUNCATED).wait_s() == 60.0
    assert row(due=1.0, first_byte_s=1.5, outcome=Outcome.TIMEOUT).wait_s(7.0) == 7.0


def test_each_row_is_on_disk_at_once(tmp_path):
    with RecordsFile(tmp_path / "deep" / "r.jsonl") as file:
        file.keep(row(0))
        assert [one.n for one in read_records(tmp_path / "deep" / "r.jsonl")] == [0]
        file.keep(row(1))
    assert [one.n for one in read_records(tmp_path / "deep" / "r.jsonl")] == [0, 1]


def test_half_a_line_at_the_end_is_left_out(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordsFile(path) as file:
        file.keep(row(0))
    with path.open("ab") as more:
        more.write(b'{"run": "r", "n"')

    assert [one.n for one in read_records(path)] == [0]


def test_a_line_that_is_no_row_is_named(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"n": 3}\n')

    with pytest.raises(ConfigError, match=r"r\.jsonl:1 cannot be read"):
        read_records(tmp_path / "r.jsonl")


def test_a_full_disk_is_said():
    with RecordsFile(Path("/dev/full")) as file, pytest.raises(ConfigError, match="No space left on device"):
        file.keep(row(0))


@pytest.mark.parametrize("name", [".", "a-file/r.jsonl"])
def test_a_place_that_cannot_be_written_is_known_before_the_run(tmp_path, name):
    (tmp_path / "a-file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        RecordsFile(tmp_path / name)


def test_rows_of_a_resumed_measurement_follow_those_that_are_there(tmp_path):
    for number in range(2):
        with RecordsFile(tmp_path / "r.jsonl", append=True) as file:
            file.keep(row(number))

    assert [one.n for one in read_records(tmp_path / "r.jsonl")] == [0, 1]
