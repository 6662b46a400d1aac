"""`epd-bench transfer pd` around its stages, which are played here: what it asks, refuses, prints and writes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench import transfer_pd
from bench import transfer_pd_stages as stages
from bench.cli import main
from bench.transfer_pd_figures import Case
from epd_serve.errors import StageError
from tests.bench.pd_transfers import sample, transfer


@pytest.fixture
def played(monkeypatch):
    """Stages that answer at once; the turns that they were asked."""
    asked = []

    def measure(transport, turns):
        asked.append((transport, turns))
        return [
            sample(mode, 1.0, turn=turn, case=Case(transport, tokens, together))
            for together, rounds in turns.rounds.items()
            for turn in range(rounds)
            for tokens in turns.lengths
            for mode in turns.modes
        ]

    monkeypatch.setattr(stages, "measure", measure)
    monkeypatch.setattr(stages, "available_transports", lambda: stages.TRANSPORTS)
    monkeypatch.setattr(
        transfer_pd,
        "run_emulation",
        lambda quick: ({"kv_ms_adaptive_over_bulk_256": 1.0}, [{"kind": "emulated"}], ["emulated: a table"]),
    )
    return asked


def test_real_and_emulated_stand_apart_in_print_and_in_the_record(played, tmp_path, capsys):
    assert main(["transfer", "pd", "--quick", "--json", str(tmp_path / "r.json")]) == 0

    shown = capsys.readouterr().out
    assert shown.count("real: P-D, two vLLM processes on CPU") == 2
    assert "emulated: a table" in shown
    saved = json.loads((tmp_path / "r.json").read_text())
    assert {row["kind"] for row in saved["rows"]} == {"real", "emulated"}
    assert "real" in saved["env"]["kind"] and "emulated" in saved["env"]["kind"]
    for name in transfer_pd.SHOWN[:3]:
        assert name in shown and {name, f"{name}_mooncake"} <= saved["figures"].keys()


def test_goals_are_printed_with_what_was_found(played, capsys):
    main(["transfer", "pd", "--quick"])

    met = [line.split() for line in capsys.readouterr().out.splitlines() if "kv_ms_adaptive_over_bulk_256" in line]
    assert met and met[0][:5] == ["kv_ms_adaptive_over_bulk_256", "1", "<=", "1.02", "met"]


def test_quick_asks_less(played):
    main(["transfer", "pd"])
    main(["transfer", "pd", "--quick"])

    (_, whole), _, (_, quick), _ = played
    assert (whole.lengths, whole.rounds) == ((256, 512, 1024, 2048, 4096), {1: 12, 16: 3})
    assert (quick.lengths, quick.rounds) == ((256, 1024, 2048), {1: 4})
    assert whole.modes == quick.modes == ("bulk", "layerwise", "fixed:2", "fixed:4", "fixed:8", "adaptive")
    assert quick.budget_s < whole.budget_s


def test_what_is_asked_can_be_named(played):
    flags = "--lengths 64,128 --modes bulk,fixed:3 --concurrency 2 --transports shm --rounds 8"
    main(["transfer", "pd", *flags.split()])

    assert played == [("shm", stages.Turns((64, 128), ("bulk", "fixed:3"), {2: 2}))]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--modes bulk,wide", "'wide' is none of adaptive"),
        ("--modes ,", "none of adaptive"),
        ("--transports rdma", "'rdma' is none of shm, mooncake"),
        ("--rounds 0", "--rounds 0: numbers between 1 and"),
        ("--lengths 256,1e3", "--lengths 256,1e3: numbers between 1 and"),
        ("--lengths 100000", "--lengths 100000: numbers between 1 and"),
        ("--concurrency 0", "--concurrency 0: numbers between 1 and"),
        ("--plot timeline.gif", "name a file that ends in .png"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_launch(played, capsys, flags, message):
    assert main(["transfer", "pd", *flags.split()]) == 1

    assert message in capsys.readouterr().err
    assert played == []


def test_mooncake_is_left_out_where_it_is_not_installed(played, monkeypatch, capsys):
    monkeypatch.setattr(stages, "available_transports", lambda: ("shm",))
    main(["transfer", "pd", "--quick"])

    assert [transport for transport, _ in played] == ["shm"]
    assert "Mooncake is not installed" in capsys.readouterr().out
    assert main(["transfer", "pd", "--transports", "shm,mooncake"]) == 1
    assert "'mooncake' is not installed" in capsys.readouterr().err


def test_the_picture_shows_each_mode_at_the_length_nearest_to_1024(played, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(transfer_pd, "check_plot", lambda path: None)
    monkeypatch.setattr(transfer_pd, "draw", lambda *arguments: drawn.append(arguments))
    path = tmp_path / "t.png"
    main(["transfer", "pd", "--lengths", "256,900", "--modes", "bulk,adaptive", "--plot", str(path)])

    ((where, panels, heading),) = drawn
    assert where == path
    assert [mode for mode, _ in panels] == ["bulk", "adaptive"]
    assert "real" in heading and "shm, 900 tokens, 1 at a time" in heading


@pytest.mark.parametrize("mode", ["bulk", "layerwise", "fixed:2", "fixed:4", "adaptive"])
def test_a_p_that_follows_the_mode_is_believed(mode):
    stages.check_mode(sample(mode, 1.0))


@pytest.mark.parametrize(("mode", "groups"), [("bulk", (4, 4)), ("fixed:4", (3, 5)), ("layerwise", (1, 1, 6))])
def test_a_p_that_packs_otherwise_than_the_mode_says_is_no_measurement(mode, groups):
    with pytest.raises(StageError, match=f"layers in mode {mode}"):
        stages.check_mode(dataclasses.replace(sample(mode, 1.0), transfer=transfer(groups)))


def test_a_prompt_in_two_steps_has_the_groups_of_the_mode_twice():
    once = transfer((4, 4))
    twice = dataclasses.replace(once, packets=once.packets * 2)

    stages.check_mode(dataclasses.replace(sample("fixed:4", 1.0), transfer=twice))
