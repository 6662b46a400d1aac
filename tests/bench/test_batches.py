"""Stages against their batch size: what of the answers becomes a point, and where a stage is saturated."""

from __future__ import annotations

import argparse

import pytest

from bench.batches import point_of, sizes_of, stages_of
from bench.batches_figures import BatchPoint, draw, figures, lines, saturates_at
from bench.cli import main
from bench.flows import GOOD, Outcome
from epd_serve.errors import ConfigError, StageError

POINTS = [
    BatchPoint("encode", 1, 4, 10.0, 100.0),
    BatchPoint("encode", 2, 8, 19.0, 105.0),
    BatchPoint("encode", 4, 16, 20.0, 200.0),
]


def outcome(due: float, first: float, ended: float, verdict: str = GOOD) -> Outcome:
    return Outcome("k", due, first, ended, verdict, "said so")


def asked(**more: object) -> argparse.Namespace:
    given = {"stages": "encode,decode", "sizes": None, "quick": True, "prompt": 8, "answer": 2, "side": 28}
    return argparse.Namespace(**{**given, **more})


def test_encode_and_prefill_count_what_they_take_over_the_whole_time():
    outcomes = [outcome(0.0, 0.5, 0.5), outcome(0.0, 1.0, 1.0), outcome(0.5, 2.0, 2.0)]

    assert point_of("encode", 2, outcomes, prompt=100, answer=9) == BatchPoint("encode", 2, 3, 1.5, 1000.0)
    assert point_of("prefill", 2, outcomes, prompt=100, answer=9).per_s == 150.0


def test_decode_counts_from_the_first_token_of_each_answer():
    outcomes = [outcome(0.0, 1.0, 2.0), outcome(0.0, 1.5, 2.5)]

    assert point_of("decode", 2, outcomes, prompt=100, answer=11) == BatchPoint("decode", 2, 2, 20.0, 100.0)


def test_a_bad_answer_is_no_point():
    with pytest.raises(StageError, match=r"encode, 2 at once: 1 of 2 answers failed: status 500: said so"):
        point_of("encode", 2, [outcome(0, 1, 1), outcome(0, 0, 1, "status 500")], prompt=1, answer=2)


def test_an_answer_that_comes_at_once_has_no_time_per_token():
    with pytest.raises(StageError, match="ask for a longer --answer"):
        point_of("decode", 1, [outcome(0, 1, 1)], prompt=1, answer=2)


def test_a_stage_is_saturated_where_more_at_once_gives_little_more():
    assert saturates_at(POINTS) == 2
    assert saturates_at([]) is None
    assert saturates_at(POINTS[:2]) is None  # a larger one may give more
    assert figures(POINTS)["encode/saturates_at"] == 2
    assert figures(POINTS)["encode/4/per_s"] == 20.0
    assert [row[4] for row in lines(POINTS)[1:]] == ["1.00", "1.90 (saturated)", "2.00"]


def test_sizes_and_stages_are_checked_before_anything_is_started(capsys):
    assert sizes_of(asked(sizes="4,1,4")) == (1, 4)
    assert stages_of(asked()) == ("encode", "decode")
    for wrong in ({"sizes": "0"}, {"sizes": "1,x"}, {"sizes": "9999"}):
        with pytest.raises(ConfigError, match=r"--sizes .*: numbers between 1 and 512"):
            sizes_of(asked(**wrong))
    for wrong, words in (
        ({"stages": "draw"}, "--stages: 'draw' is none of"),
        ({"answer": 1}, "--answer 1: at least 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            stages_of(asked(**wrong))
    assert main(["batches", "--plot", "x.svg"]) == 1
    assert "name a file that ends in .png" in capsys.readouterr().err


@pytest.mark.slow
def test_the_curves_of_simulated_stages_are_a_picture(tmp_path, capsys):
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


@pytest.mark.slow
def test_a_picture_of_one_stage_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="epd-serve[bench] is not installed")
    draw(tmp_path / "deep" / "batches.png", POINTS, "real: a test")

    assert (tmp_path / "deep" / "batches.png").read_bytes().startswith(b"\x89PNG")
