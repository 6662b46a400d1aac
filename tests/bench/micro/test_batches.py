"""Stages against their batch size: what of the answers becomes a row, and where a stage is saturated."""

from __future__ import annotations

import pytest

from bench.cli import main
from bench.clients.records import Outcome, RequestRecord
from bench.micro.batches import draw, figures, row_of, saturates_at, tables
from epd_serve.errors import StageError

ROWS = [
    {"stage": "encode", "size": 1, "requests": 4, "per_s": 10.0, "each_ms": 100.0},
    {"stage": "encode", "size": 2, "requests": 8, "per_s": 19.0, "each_ms": 105.0},
    {"stage": "encode", "size": 4, "requests": 16, "per_s": 20.0, "each_ms": 200.0},
]


def record(due_s: float, first_byte_s: float, ended_s: float) -> RequestRecord:
    return RequestRecord("", 0, "", "", due_s, due_s, ended_s, Outcome.OK, sent_s=due_s, first_byte_s=first_byte_s)


def test_encode_and_prefill_count_what_they_take_over_the_whole_time():
    records = [record(0.0, 0.5, 0.5), record(0.0, 1.0, 1.0), record(0.5, 2.0, 2.0)]

    encode = row_of("encode", 2, records, prompt=100, answer=9)
    assert encode == {"stage": "encode", "size": 2, "requests": 3, "per_s": 1.5, "each_ms": 1000.0}
    assert row_of("prefill", 2, records, prompt=100, answer=9)["per_s"] == 150.0


def test_decode_counts_from_the_first_token_of_each_answer():
    row = row_of("decode", 2, [record(0.0, 1.0, 2.0), record(0.0, 1.5, 2.5)], prompt=100, answer=11)

    assert (row["per_s"], row["each_ms"]) == (20.0, 100.0)


def test_an_answer_whose_tokens_come_together_has_no_time_per_token():
    with pytest.raises(StageError, match="ask for a longer --answer"):
        row_of("decode", 1, [record(0, 1, 1)], prompt=1, answer=2)


def test_a_stage_is_saturated_where_more_requests_give_little_more():
    assert saturates_at(ROWS) == 2
    assert saturates_at([]) is None
    assert saturates_at(ROWS[:2]) is None  # a larger one may give more
    assert figures(ROWS)["encode/saturates_at"] == 2
    assert figures(ROWS)["encode/4/per_s"] == 20.0
    (table,) = tables(ROWS)
    assert ["saturated" in line for line in table.splitlines()[1:]] == [False, True, False]


@pytest.mark.parametrize(
    "flags", ["--sizes 0", "--sizes 1,x", "--sizes 9999", "--stages draw", "--answer 1", "--side 0"]
)
def test_sizes_and_stages_are_checked_before_anything_is_started(capsys, flags):
    with pytest.raises(SystemExit):
        main(["batches", *flags.split()])

    assert flags.split()[0] in capsys.readouterr().err


def test_a_chart_has_to_be_a_png(capsys):
    assert main(["batches", "--plot", "x.svg"]) == 1
    assert "--plot x.svg" in capsys.readouterr().err


@pytest.mark.slow
def test_the_curves_of_simulated_stages_are_a_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="epd-serve[bench] is not installed")
    plot, record = tmp_path / "batches.png", tmp_path / "batches.json"
    profile = tmp_path / "profile.json"
    profile.write_text('{"decode_step_s": [[1, 0.005]]}')
    flags = ["--engine", "sim", "--quick", "--sizes", "1,2", "--prompt", "64", "--answer", "8"]
    flags += ["--sim-profile", str(profile)]

    assert main(["batches", *flags, "--plot", str(plot), "--json", str(record)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "decode/2/per_s" in record.read_text()
    assert "simulated stages" in capsys.readouterr().out


def test_a_chart_of_one_stage_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="epd-serve[bench] is not installed")
    draw(tmp_path / "deep" / "batches.png", ROWS, "real: a test")

    assert (tmp_path / "deep" / "batches.png").read_bytes().startswith(b"\x89PNG")
