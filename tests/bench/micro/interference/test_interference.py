"""`epd-bench interference`: from samples to slowdowns, the picture, and two real processes on a small scale."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time

import pytest

from bench.cli import main
from bench.micro.interference import command
from bench.micro.interference.command import chosen, device_of, figures, save_profile, tables
from bench.micro.interference.operators import BENCH, operators
from bench.micro.interference.processes import OperatorProcess, orders_of, parse_shares
from bench.micro.interference.windows import (
    label,
    latency_s,
    maps,
    means_by_needs,
    overlapping,
    slowdowns,
    windows,
)
from bench.micro.measurement import Row
from epd_serve.errors import ConfigError, StageError
from npu_ops.core_grants import CoreOrder

CPU = {"kind": "cpu", "name": "a CPU", "devices": 1, "cores": {"cpu": 2}}
ENV = {"date": "2025-01-01", "commit": "abc", "command": "c", "machine": {"cores": 2}, "versions": {}}
TINY = dataclasses.replace(
    BENCH, encoder_tokens=8, prompt_tokens=8, context=16, decode_layers=2, copy_bytes=4096, reduce_bytes=4096
)


def calls(first: float, last: float, each: float) -> list[tuple[float, float]]:
    count = round((last - first) / each)
    return [(first + each * place, first + each * (place + 1)) for place in range(count)]


def test_only_calls_within_the_time_of_both_count():
    slow, fast = calls(0.0, 10.0, 2.0), calls(0.5, 9.5, 0.5)

    kept = overlapping([slow, fast], 1.0, 9.0)

    assert kept[0] == [(2.0, 4.0), (4.0, 6.0), (6.0, 8.0)]
    assert kept[1][0] == (1.0, 1.5) and kept[1][-1] == (8.5, 9.0)


@pytest.mark.parametrize(("first", "last"), [(1.5, 10.0), (0.0, 8.0)])
def test_a_process_that_comes_late_or_ends_early_spoils_the_window(first, last):
    with pytest.raises(StageError, match="late to its window"):
        overlapping([calls(0.0, 10.0, 1.0), calls(first, last, 0.5)], 1.0, 9.0)


def test_a_process_that_finishes_too_little_spoils_the_window():
    with pytest.raises(StageError, match="fewer than 3 calls in 8 s: raise --seconds"):
        overlapping([calls(0.0, 10.0, 1.0), calls(0.0, 12.0, 4.0)], 1.0, 9.0)


def test_the_latency_of_a_call_is_the_mean_of_its_samples():
    assert latency_s([(0.0, 2.0), (2.0, 6.0)], repeats=10) == pytest.approx(0.3)


def test_equal_shares_need_every_pair_once_and_unequal_ones_in_both_orders():
    alone = [("a", None), ("b", None), (None, "a"), (None, "b")]

    assert windows(["a", "b"], None) == [*alone, ("a", "a"), ("a", "b"), ("b", "b")]
    assert windows(["a", "b"], (0.5, 0.5)) == windows(["a", "b"], None)
    assert windows(["a", "b"], (0.3, 0.7)) == [*alone, ("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]


def of_round(
    turn: int, slow: float, shares: tuple[float | None, float | None] = (None, None), names: str = "ab"
) -> list[Row]:
    """`slow`: of the machine. The first takes 1 ms, the second 2 ms; beside each other 3 and 1.5 times as long."""
    alone_ms = dict(zip(names, (1.0, 2.0), strict=True))
    first, second = tuple(names)
    times = {(first, second): 3.0, (second, first): 1.5}

    def row(seat: int, own: str, beside: str | None, ms: float) -> Row:
        more = {"beside": beside, "beside_share": shares[1 - seat] if beside else None}
        return {"round": turn, "process": seat, "operator": own, "share": shares[seat], **more, "latency_ms": slow * ms}

    rows = [row(seat, name, None, alone_ms[name]) for seat in (0, 1) for name in names]
    for left, right in ((first, first), (first, second), (second, second), (second, first)):
        for seat, own, other in ((0, left, right), (1, right, left)):
            rows.append(row(seat, own, other, alone_ms[own] * times.get((own, other), 2.0)))
    return rows


def test_a_slow_machine_slows_both_and_changes_no_slowdown():
    found = [*of_round(0, 1.0), *of_round(1, 7.0), *of_round(2, 1.1)]

    (one,) = maps(found, ["a", "b"])

    assert one.core_shares is None
    assert one.of("a", "b").slowdown == 3.0 and one.of("b", "a").slowdown == 1.5
    assert one.of("a", "b").rounds == 3
    assert one.alone_s == {"a": pytest.approx(1.1e-3), "b": pytest.approx(2.2e-3)}
    assert {round(row["slowdown"], 6) for row in slowdowns(found)} == {1.5, 2.0, 3.0}


def test_unequal_shares_make_a_map_for_each_side_after_the_one_without():
    found = [*of_round(0, 1.0, (0.3, 0.7)), *of_round(0, 1.0)]

    assert [one.core_shares for one in maps(found, ["a", "b"])] == [None, (0.3, 0.7), (0.7, 0.3)]


def test_pairs_with_the_same_need_are_set_against_those_with_different_ones():
    (one,) = maps(of_round(0, 1.0), ["a", "b"])

    assert means_by_needs(one, {"a": "compute", "b": "memory"}) == {"alike": 2.0, "unlike": 2.25}
    assert means_by_needs(one, {"a": "memory", "b": "memory"}) == {"alike": 2.125}


# --- shares


def test_shares_are_two_numbers_that_fit_on_a_device():
    assert parse_shares("0.3,0.7") == (0.3, 0.7)
    for wrong in ("0.5", "a,b", "0.5,0.5,0.1"):
        with pytest.raises(argparse.ArgumentTypeError, match="two numbers"):
            parse_shares(wrong)
    for wrong in ("0.6,0.6", "0,1", "-0.1,0.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="their sum at most 1"):
            parse_shares(wrong)


def test_shares_of_a_cpu_are_cores_of_its_own():
    first, second = orders_of("cpu", (0.25, 0.75), (0, 1, 2, 3))
    assert (first.cores, second.cores) == ((0,), (1, 2, 3))
    assert (first.share, second.share) == (0.25, 0.75)
    with pytest.raises(ConfigError, match=r"--core-share 0\.3,0\.7: 1 core for 2 shares"):
        orders_of("cpu", (0.3, 0.7), (4,))


def test_on_a_gpu_shares_need_mps(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))

    with pytest.raises(ConfigError, match="without MPS the processes of a GPU take turns"):
        orders_of("cuda", (0.5, 0.5))


# --- command


def measured() -> list[Row]:
    every = [one for one in operators("cpu", 1, BENCH).values() if one.name in ("norm", "encoder_matmul")]
    first = {"device": CPU, "operators": [dataclasses.asdict(one) for one in every]}
    rows = [*of_round(0, 1.0, names="ab"), *of_round(0, 1.0, (0.5, 0.5), names="ab")]
    named = {"a": "norm", "b": "encoder_matmul", None: None}
    return [first, *({**row, "operator": named[row["operator"]], "beside": named[row["beside"]]} for row in rows)]


def test_the_profile_says_what_was_measured_on_what(tmp_path):
    save_profile(argparse.Namespace(profile=tmp_path / "p.json"), measured(), ENV)

    saved = json.loads((tmp_path / "p.json").read_text())
    assert (saved["kind"], saved["device"], saved["measured"]) == ("real", CPU, ENV)
    assert {one["name"]: one["needs"] for one in saved["operators"]} == {"norm": "memory", "encoder_matmul": "compute"}
    assert [one["core_shares"] for one in saved["maps"]] == [None, [0.5, 0.5]]


def test_figures_and_tables_name_both_divisions():
    rows = measured()

    named = figures(rows)
    assert named["all cores/slowdown/norm/encoder_matmul"] == 3.0
    assert named["all cores/alone_ms/norm"] == 1.0
    assert named["share 0.5 beside 0.5/mean_slowdown_of_needs/alike"] == 2.0
    printed = "\n".join(tables(rows))
    assert "all cores: times slower, beside" in printed and "share 0.5 beside 0.5/mean_slowdown" in printed


def test_a_division_says_who_has_which_share():
    assert (label(None), label((0.3, 0.7))) == ("all cores", "share 0.3 beside 0.7")


def test_an_operator_that_the_device_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"--operators sort: cpu with 1 device\(s\) has encoder_matmul"):
        chosen(("norm", "sort"), CPU)
    assert [one.name for one in chosen(("norm", "encoder_matmul"), CPU)] == ["norm", "encoder_matmul"]


def test_a_device_that_is_not_here_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("PATH", "")

    with pytest.raises(ConfigError, match="--device npu: npu-smi is not on PATH"):
        device_of("npu")


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--seconds", "0"], ["--core-share", "0.5"]])
def test_bad_numbers_are_refused_before_anything_starts(monkeypatch, capsys, wrong):
    monkeypatch.setattr(command, "OperatorProcess", lambda *_: pytest.fail("started"))

    with pytest.raises(SystemExit):
        main(["interference", "--device", "cpu", *wrong])
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_run_at_the_same_time():
    seats = [OperatorProcess("cpu", 0, TINY) for _ in range(2)]
    try:
        for seat in seats:
            assert seat.ready() == ""
            assert seat.prepare("norm") >= 1
        assert seats[0].prepare("all_reduce") >= 1  # with a peer of its own
        at = time.monotonic() + 0.1
        seats[0].begin("all_reduce", at, at + 0.2)
        seats[1].begin("norm", at, at + 0.2)
        for spans in (seat.spans(60.0) for seat in seats):
            assert at <= spans[0][0] and spans[-1][1] >= at + 0.2
    finally:
        for seat in seats:
            seat.stop()


@pytest.mark.slow
def test_a_process_with_a_share_has_cores_of_its_own():
    core = min(os.sched_getaffinity(0))
    seat = OperatorProcess("cpu", 0, TINY, CoreOrder("cpu", "first", {"first": 0.5, "second": 0.5}, (core,)))
    try:
        assert seat.ready() == f"core {core}"
    finally:
        seat.stop()
