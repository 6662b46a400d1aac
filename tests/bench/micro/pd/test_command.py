"""`epd-bench transfer pd` around its stages, which are played here: what it asks, refuses, prints and writes."""

from __future__ import annotations

import json

import pytest

from bench.cli import main
from bench.micro.pd import command, stages
from epd_serve.errors import StageError
from tests.bench.micro.pd.transfers_made import row


@pytest.fixture
def played(monkeypatch):
    """Stages that answer at once; the turns that they were asked."""
    asked = []

    def measure(transport, turns, device, preset):
        asked.append((transport, turns))
        about = {} if device == "cpu" else {"device": device}
        for concurrency, rounds in turns.rounds.items():
            for turn in range(rounds):
                for tokens in turns.lengths:
                    for mode in turns.modes:
                        case = {"transport": transport, "tokens": tokens, "concurrency": concurrency}
                        yield row(mode, 1.0, turn=turn, **case, **about)

    monkeypatch.setattr(stages, "measure", measure)
    monkeypatch.setattr(stages, "available_transports", lambda: stages.TRANSPORTS)
    return asked


def test_what_is_quoted_is_printed_and_in_the_record_of_both_transports(played, tmp_path, capsys):
    assert main(["transfer", "pd", "--quick", "--json", str(tmp_path / "r.json")]) == 0

    printed = capsys.readouterr().out
    saved = json.loads((tmp_path / "r.json").read_text())
    assert {one["kind"] for one in saved["rows"]} == {"real"} and saved["env"]["kind"].startswith("real")
    names = ("real_exposed_adaptive_over_bulk_1024", "real_overlap_1024_adaptive", "real_exposed_ms_adaptive_1024")
    for name in names:
        assert name in printed and {name, f"{name}_mooncake"} <= saved["figures"].keys()


def test_quick_asks_less(played):
    main(["transfer", "pd"])
    main(["transfer", "pd", "--quick"])

    (_, whole), _, (_, quick), _ = played
    assert set(quick.lengths) < set(whole.lengths)
    assert sum(quick.rounds.values()) < sum(whole.rounds.values())
    assert set(quick.rounds) == {1} < set(whole.rounds)
    assert whole.modes == quick.modes == command.MODES
    assert quick.budget_s < whole.budget_s


def test_what_is_asked_can_be_named(played):
    flags = "--lengths 64,128 --modes bulk,fixed:3 --concurrency 2 --transports shm --rounds 8"
    main(["transfer", "pd", *flags.split()])

    ((transport, turns),) = played
    assert (transport, turns.lengths, turns.modes, turns.rounds) == ("shm", (64, 128), ("bulk", "fixed:3"), {2: 2})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--modes bulk,wide", "'wide' is none of adaptive"),
        ("--modes ,", "none of adaptive"),
        ("--transports rdma", "--transports: 'rdma' is none of shm, mooncake"),
        ("--rounds 0", "--rounds: '0'"),
        ("--lengths 256,1e3", "--lengths: '1e3'"),
        ("--lengths 100000", "--lengths: '100000'"),
        ("--concurrency 0", "--concurrency: '0'"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_launch(played, capsys, flags, message):
    try:
        refused = main(["transfer", "pd", *flags.split()])
    except SystemExit as ended:  # argparse's own refusal
        refused = ended.code

    assert refused
    assert message in capsys.readouterr().err
    assert played == []


def test_on_a_card_the_figures_are_named_after_it(played, tmp_path):
    words = ["--device", "cuda", "--preset", "8b", "--quick", "--json", str(tmp_path / "r.json")]

    assert main(["transfer", "pd", *words]) == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert "cuda_exposed_adaptive_over_bulk_1024" in saved["figures"]
    assert "on cuda, 8b preset" in saved["env"]["kind"]


def test_mooncake_is_left_out_where_it_is_not_installed(played, monkeypatch, capsys):
    monkeypatch.setattr(stages, "available_transports", lambda: ("shm",))
    main(["transfer", "pd", "--quick"])

    assert [transport for transport, _ in played] == ["shm"]
    assert "not installed: mooncake" in capsys.readouterr().out
    assert main(["transfer", "pd", "--transports", "shm,mooncake"]) == 1
    assert "mooncake is not installed" in capsys.readouterr().err


def test_what_was_measured_before_a_stage_failed_is_kept(played, monkeypatch, tmp_path):
    whole = stages.measure

    def failing(transport, *more):
        if transport == "mooncake":
            raise StageError("P0 is gone", stage="P0")
        return whole(transport, *more)

    monkeypatch.setattr(stages, "measure", failing)

    assert main(["transfer", "pd", "--quick", "--json", str(tmp_path / "r.json")]) == 1
    saved = json.loads((tmp_path / "r.json").read_text())
    assert {one["transport"] for one in saved["rows"]} == {"shm"}
    assert "P0 is gone" in saved["env"]["incomplete"]
