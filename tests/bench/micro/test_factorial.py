"""The factorial's figures: ratios within a round, and starts of which whole answers came at once told apart."""

from __future__ import annotations

import argparse

import pytest

from bench.clients.results import Outcome, RequestRecord
from bench.micro.factorial import BASE, Variant, figures, starved, tables, times, variants
from bench.micro.measurement import Row


def row(target: str, round_: str, *, load: str = "1 at once", spaced: float = 1.0, **ms: float) -> Row:
    slow = {"ttft_ms": 20.0, "tpot_ms": 4.0, "e2e_ms_per_token": 5.0} | ms
    return {
        "target": target,
        "load": load,
        "round": round_,
        "group": round_[:3],
        "spaced": spaced,
        "core_us": [9.0],
        **slow,
    }


def test_ratios_are_to_the_base_of_the_same_round() -> None:
    rows = [row(BASE, f"0/0/{at}", ttft_ms=10 * (at + 1)) for at in range(3)]
    rows += [row("TP1", f"0/0/{at}", ttft_ms=11 * (at + 1), e2e_ms_per_token=6.0) for at in range(3)]
    found = figures(rows)
    assert found["TP1/1 at once/ttft_over_vllm"] == 1.1
    assert (found["tp1_ttft_over_vllm"], found["tp1_tpot_over_vllm"]) == (1.1, 1.2)


def test_the_worst_number_at_once_is_what_a_goal_is_held_against() -> None:
    rows = [row(name, "0/0/0", load=load) for name in (BASE, "TP1") for load in ("1 at once", "8 at once", "0.4")]
    rows[4]["ttft_ms"], rows[5]["ttft_ms"] = 30.0, 90.0
    assert figures(rows)["tp1_ttft_over_vllm"] == 1.5


def test_a_starved_start_counts_end_to_end_alone() -> None:
    rows = [row(name, f"{start}/0/0") for name in (BASE, "TP1") for start in range(2)]
    rows += [row("TP1", "2/0/0"), row(BASE, "2/0/0", spaced=0.1, ttft_ms=100.0, tpot_ms=0.01, e2e_ms_per_token=2.5)]
    assert starved(rows) == {(BASE, "2/0")}
    found = figures(rows)
    assert found["TP1/1 at once/tpot_over_vllm"] == 1.0
    assert (found["starved_starts"], found["starts"]) == (1, 6)
    rows = rows[-2:]
    assert figures(rows)["TP1/1 at once/e2e_over_vllm"] == 2.0
    assert "TP1/1 at once/ttft_over_vllm" not in figures(rows)
    assert list(tables(rows))


def record(tokens_s: list[float]) -> RequestRecord:
    return RequestRecord("", 0, "", "", 0.0, 0.0, tokens_s[-1], Outcome.OK, 0.0, tuple(tokens_s), tokens_s[-1])


def test_a_round_says_how_evenly_tokens_came() -> None:
    even = times([record([0.1, 0.2, 0.3, 0.4])])
    assert (even["ttft_ms"], even["tpot_ms"], even["spaced"]) == (100.0, pytest.approx(100.0), 1.0)
    assert even["e2e_ms_per_token"] == pytest.approx(100.0)
    assert times([record([0.397, 0.398, 0.399, 0.4]), record([0.4, 0.4, 0.4, 0.5])])["spaced"] < 0.5


def test_each_part_is_taken_away_alone_or_all_are_combined() -> None:
    short = {str(each).removeprefix("stage") for each in variants(argparse.Namespace(whole=False))}
    assert short == {"", " -inside", " -inside -bell", " -reports", " -priority", " 2t"}
    combined = variants(argparse.Namespace(whole=True))
    assert len(set(combined)) == 24 and Variant(threads=1) in combined
