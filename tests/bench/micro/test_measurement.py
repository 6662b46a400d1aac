"""What every measurement does: flags, the order of a run, and what becomes of it when it fails."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from bench.micro.measurement import (
    LEAST_ROUNDS,
    Goal,
    Measurement,
    Usually,
    flag,
    goal_table,
    in_turns,
    one_of,
    resolve,
    several,
    whole,
)
from bench.micro.rows import grouped, ratios
from bench.statistic import Spread
from epd_serve.errors import StageError


def counted(measure, **more):
    return Measurement(
        quick="less",
        measure=measure,
        figures=lambda rows: {"count": len(rows)},
        **more,
    )


def arguments(measurement, *argv):
    parser = argparse.ArgumentParser()
    measurement.add_arguments(parser)
    return parser.parse_args(argv)


def test_rows_become_figures_and_a_result_and_all_are_printed(tmp_path, capsys):
    measurement = counted(lambda arguments: iter([{"n": 1}, {"n": 2}]), goals=(Goal("count", ">=", 2),))
    path = tmp_path / "r.json"

    assert measurement.run(arguments(measurement, "--json", str(path)), ["x"]) == 0

    saved = json.loads(path.read_text())
    assert (saved["figures"], saved["rows"]) == ({"count": 2}, [{"n": 1}, {"n": 2}])
    assert saved["env"]["kind"] == "real" and "incomplete" not in saved["env"]
    printed = capsys.readouterr().out
    assert "n 1" in printed and "count" in printed and "met" in printed


@pytest.mark.parametrize("ends", [StageError("E0 is gone", stage="E0"), KeyboardInterrupt(), SystemExit(143)])
def test_what_was_measured_before_an_error_or_an_interrupt_is_kept(tmp_path, ends):
    def measure(arguments):
        yield {"n": 1}
        raise ends

    measurement, path = counted(measure), tmp_path / "r.json"

    with pytest.raises(type(ends)):
        measurement.run(arguments(measurement, "--json", str(path)), ["x"])

    saved = json.loads(path.read_text())
    assert saved["rows"] == [{"n": 1}] and saved["figures"] == {}
    assert type(ends).__name__ in saved["env"]["incomplete"]


def test_where_nothing_was_measured_nothing_is_written(tmp_path):
    def measure(arguments):
        raise StageError("nothing starts", stage="E0")
        yield

    measurement, path = counted(measure), tmp_path / "r.json"

    with pytest.raises(StageError):
        measurement.run(arguments(measurement, "--json", str(path)), ["x"])
    assert not path.exists()


def test_a_goal_is_met_missed_or_not_measured():
    goals = (Goal("fast", "<=", 1.0), Goal("much", ">=", 0.9), Goal("one", "==", 1), Goal("absent", "<=", 1.0))

    table = goal_table({"fast": 2.0, "much": 0.95, "one": 1.0}, goals).splitlines()

    assert ["MISSED" in line for line in table[1:]] == [True, False, False, False]
    assert ["met" in line.split() for line in table[1:]] == [False, True, True, False]
    assert "not measured" in table[-1]


@pytest.mark.parametrize(("least", "code"), [(1, 0), (2, 1)])
def test_a_required_goal_that_is_missed_fails_the_command(least, code):
    measurement = counted(lambda arguments: iter([{"n": 1}]), required=(Goal("count", ">=", least),))

    assert measurement.run(arguments(measurement), ["x"]) == code


def test_quick_lowers_defaults_and_what_is_given_wins():
    flags = {"--rounds --turns": flag("of all", Usually(12, quick=4), whole())}
    measurement = counted(lambda arguments: iter(()), flags=flags, settings={"events": Usually(9, quick=1)})
    rounds = []
    for argv in ((), ("--quick",), ("--quick", "--turns", "7")):
        parsed = arguments(measurement, *argv)
        resolve(parsed)
        rounds.append(parsed.rounds)

    assert rounds == [12, 4, 7] and parsed.events == 1
    assert flags["--rounds --turns"]["help"] == "of all (default 12, quick 4)"
    assert flag("x", (1, 2))["help"] == "x (default 1,2)" and flag("x")["help"] == "x"


def test_all_kinds_take_their_turn_in_an_order_drawn_for_each_round():
    turns = [[kind for of, kind in in_turns("abcd", 20) if of == turn] for turn in range(20)]

    assert all(sorted(turn) == [*"abcd"] for turn in turns)
    assert len({turn[0] for turn in turns}) == 4


def test_out_of_time_there_are_the_least_rounds_all_the_same(capsys):
    assert [turn for turn, _ in in_turns("a", 5, budget_s=0.0)] == [*range(LEAST_ROUNDS)]
    assert "2 rounds instead of 5" in capsys.readouterr().out


def test_lists_of_numbers_and_names_are_checked_and_counted_once():
    assert several(whole(1, 9))("1,2,1") == (1, 2)
    assert several(one_of("a", "b"))("b,a") == ("b", "a")
    for kind, text in ((whole(2), "1"), (whole(1, 9), "10"), (whole(), "1e3"), (several(one_of("a")), "a,c")):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_ratios_are_within_a_turn_and_of_medians_in_it():
    base = [{"round": turn, "ms": slow * ms} for turn, slow in enumerate((1, 9)) for ms in (1.0, 2.0, 90.0)]
    ours = [{"round": turn, "ms": slow * ms} for turn, slow in enumerate((1, 9)) for ms in (1.0, 1.0, 50.0)]

    assert ratios(ours, base, "ms") == Spread(0.5, 0.5, 0.5)
    assert ratios(ours, [{"round": 0, "ms": 0.0}], "ms") is None
    assert ratios(ours, [], "ms") is None


def test_rows_are_grouped_in_the_order_in_which_they_come():
    rows = [{"a": 2, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 2}]

    assert [*grouped(rows, "a")] == [(2,), (1,)]
    assert grouped(rows, "a", "b")[2, 2] == [rows[2]]


def test_measuring_does_not_import_matplotlib():
    script = "import sys, bench.cli; print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "False False"
