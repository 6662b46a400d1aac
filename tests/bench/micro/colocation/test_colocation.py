"""`epd-bench colocation`: what is sent, what becomes of rounds, and the flow over simulated stages."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.clients.results import Outcome, RequestRecord
from bench.micro.colocation import command
from bench.micro.colocation.command import GROUPS, MEASUREMENT, mix_of
from bench.micro.colocation.figures import E_PD, E_PD_SHARES, figures
from bench.micro.colocation.mix import Mix, storm
from bench.micro.measurement import Row, resolve
from bench.real_stages import check_memory, closed_loop, tpot_s
from bench.served import Served, simulated
from deploy.options.config import DeployConfig
from epd_serve.errors import ConfigError, StageError
from tests.bench.clients.known_server import Connection, KnownServer
from tests.bench.clients.serving import Served as ServedAlone
from tests.waiting import wait_for

MIX = Mix(requests=6, images=4, concurrency=2, answer=3, side=64, prompt=8)


def kinds(bodies: list[dict[str, Any]]) -> list[str]:
    return ["text" if isinstance(body["messages"][0]["content"], str) else "image" for body in bodies]


# --- what is sent


def test_a_round_is_the_same_for_every_layout_and_another_one_next_time():
    assert MIX.bodies("m", 3) == MIX.bodies("m", 3)
    assert kinds(MIX.bodies("m", 3)).count("image") == 4
    first, second = (json.dumps(body) for seed in (3, 4) for body in MIX.bodies("m", seed)[:1])
    assert first != second


def test_no_image_and_no_text_is_sent_twice():
    sent = [json.dumps(body["messages"]) for seed in range(20) for body in MIX.bodies("m", seed)]

    assert len(set(sent)) == len(sent)


def test_answers_are_exactly_so_long_and_greedy():
    for body in MIX.bodies("m", 0):
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (3, True, 0, True)
        assert body["return_token_ids"], "a token without text would be no event"


# --- a round


def record(due_s: float, first_byte_s: float, ended_s: float, outcome: Outcome = Outcome.OK) -> RequestRecord:
    return RequestRecord(
        "", 0, "", "", due_s, due_s, ended_s, outcome, sent_s=due_s, first_byte_s=first_byte_s, fault="status 500"
    )


class Sent:
    """A sender process that answers with these records."""

    def __init__(self, *records: RequestRecord) -> None:
        self.rows = records

    def run(self, *_: object, **__: object) -> Sent:
        return self


def test_a_round_takes_from_its_first_request_to_its_last_answer(monkeypatch):
    monkeypatch.setattr(command, "cpu_seconds", lambda parts: {"engine": 1.0})
    launch = Served("TP1", "http://proxy", "m", {}, 1.0, (), Path())
    sender = Sent(record(0.5, 1.0, 2.0), record(1.0, 2.0, 2.5))

    row = command.play(sender, launch, [launch], MIX, seed=0, turn=0)

    assert row["seconds"] == 2.0 and row["tokens_per_s"] == 3.0
    assert row["ttft_ms"] == [500.0, 1000.0] and row["tpot_ms"] == [500.0, 250.0]
    assert row["cpu_s"] == row["others_cpu_s"] == 0.0


def test_time_per_output_token_leaves_the_first_one_out():
    assert tpot_s(record(0.0, 1.0, 1.9), tokens=10) == pytest.approx(0.1)


def test_a_round_with_a_bad_answer_is_none():
    sender = Sent(record(0.0, 1.0, 2.0), record(0.0, 0.0, 1.0, Outcome.ERROR))

    with pytest.raises(StageError, match=r"1 of 2 answers are not good, the first: status 500"):
        closed_loop(sender, "http://proxy", [{}, {}], 2)


# --- figures


def played(name: str, turn: int, seconds: float, tpot_ms: float) -> Row:
    times = {"ttft_ms": [100.0, 300.0], "tpot_ms": [tpot_ms, tpot_ms], "cpu_s": 1.5, "others_cpu_s": 0.02}
    return {"layout": name, "round": turn, "seconds": seconds, "tokens_per_s": 100 / seconds, **times}


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio():
    rounds = [
        played(name, turn, slow * seconds, slow * tpot_ms)
        for turn, slow in enumerate((1.0, 5.0, 1.2))
        for name, seconds, tpot_ms in (("TP1", 2.0, 20.0), ("(E-PD)", 4.0, 10.0))
    ]

    named = figures(rounds)

    for value, ratio in (("tput", 0.5), ("tpot", 0.5), ("ttft", 1.0)):
        assert {named[f"{value}_E_PD_over_TP1{end}"] for end in ("", "_p25", "_p75")} == {ratio}
    assert named["TP1/tpot_ms"] == 24.0 and named["(E-PD)/cpu_s"] == 1.5


def test_a_round_that_only_one_layout_played_is_left_out():
    rounds = [played("TP1", 0, 1.0, 1.0), played("(E-PD)", 0, 1.0, 1.0), played("TP1", 1, 9.0, 1.0)]

    assert figures(rounds)["tput_E_PD_over_TP1"] == 1.0


def test_the_storm_is_set_against_the_stream_alone_with_and_without_shares():
    storms = [
        {"layout": name, "round": turn, "storm": True, "solo_tpot_ms": slow * solo, "storm_tpot_ms": slow * storm}
        | {"encodes_per_s": encodes}
        for turn, slow in enumerate((1.0, 3.0))
        for name, solo, storm, encodes in ((E_PD, 10, 30, 8.0), (E_PD_SHARES, 20, 20, 4.0))
    ]

    named = figures(storms)

    assert named["tpot_under_encode_storm_over_solo"] == pytest.approx(3.0)
    assert named["tpot_under_encode_storm_over_solo_with_core_share"] == 1.0
    assert named["tpot_solo_shares_over_none"] == 2.0
    assert named["tpot_under_encode_storm_shares_over_none"] == pytest.approx(2 / 3, abs=1e-3)
    assert named["storm_encodes_shares_over_none"] == 0.5
    assert named[f"{E_PD_SHARES}/storm_encodes_per_s"] == 4.0


# --- command


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    MEASUREMENT.add_arguments(parser)
    parsed = parser.parse_args(argv)
    resolve(parsed)
    return parsed


def test_quick_cuts_rounds_and_requests_and_what_is_given_wins():
    assert arguments().rounds > arguments("--quick").rounds
    assert arguments().budget_s > arguments("--quick").budget_s
    given = arguments("--quick", "--rounds", "2", "--requests", "9", "--answer", "4", "--at-once", "5")
    assert given.rounds == 2 and mix_of(given) == Mix(9, 6, 5, 4)


@pytest.mark.parametrize("wrong", ["--rounds", "--requests", "--concurrency", "--answer"])
def test_numbers_that_measure_nothing_are_refused(capsys, wrong):
    with pytest.raises(SystemExit):
        main(["colocation", wrong, "0"])
    assert f"{wrong}" in capsys.readouterr().err


def test_answers_that_differ_fail_the_command(monkeypatch, capsys):
    rows = [{"layout": E_PD, "same_tokens": 0.75, "requests": 4}, played("TP1", 0, 1.0, 1.0)]
    monkeypatch.setattr(command, "measure", lambda arguments: iter(rows))
    measurement = dataclasses.replace(MEASUREMENT, measure=command.measure)

    assert measurement.run(arguments(), ["colocation"]) == 1
    assert "MISSED" in capsys.readouterr().out


def test_too_little_memory_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="100000 stages are up at a time"):
        check_memory(100_000)
    check_memory(0)


def test_the_layouts_and_their_flags_are_ones_that_the_launcher_takes():
    for entry in (entry for group in GROUPS.values() for entry in group):
        DeployConfig(layout=entry.layout, device="cpu")
        assert not entry.flags or entry.flags[0] == "--core-share"


# --- with simulated stages


def test_a_storm_is_encoded_image_by_image_and_ends_with_its_context():
    with simulated("E-PD") as launch:
        url = launch.stage_url("E")
        assert url is not None
        with storm(url, launch.model, side=64, concurrency=2) as run:
            wait_for(lambda: len(run.rows) >= 5)
        assert sum(one.ok for one in run.rows) >= 5 and run.ended_s > run.begun_s


class EncoderConnection(Connection):
    def answer(self, body: bytes) -> None:
        """As a real encoder: whole, counted, and without any text."""
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length"}
        self.whole(200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 1}})


class Encoder(KnownServer):
    def connection(self) -> Connection:
        return EncoderConnection(self)


def test_an_encoder_answers_without_text():
    encoder = ServedAlone(Encoder())
    encoder.start()
    wait_for(lambda: encoder.server.url)
    with storm(encoder.server.url, "m", side=64, concurrency=2) as run:
        wait_for(lambda: len(run.rows) >= 5)
    encoder.stop()

    assert sum(one.ok for one in run.rows) >= 5


def test_a_storm_that_is_refused_fails_loudly():
    with simulated("E-PD") as launch:
        url = launch.stage_url("E")
        assert url is not None
        with pytest.raises(StageError, match="in a storm of images: status 404"):
            with storm(url, "another model", side=64, concurrency=2) as run:
                wait_for(lambda: run.rows)


@pytest.mark.slow
def test_the_whole_flow_runs_on_simulated_stages(tmp_path, capsys):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"encode": {"setup_s": 0.002}, "decode_step_s": [[1, 0.02], [64, 0.02]]}))
    words = ["colocation", "--quick", "--engine", "sim", "--sim-profile", str(profile), "--rounds", "1"]
    words += ["--requests", "3", "--answer", "4", "--json", str(tmp_path / "r.json")]

    assert main(words) == 0

    saved = json.loads((tmp_path / "r.json").read_text())
    for name in ("tput_E_PD_over_TP1", "tpot_E_PD_over_TP1", "tput_E_P_D_over_EP_D"):
        assert saved["figures"][name] > 0
    assert saved["figures"]["tpot_under_encode_storm_over_solo"] > 0
    assert saved["figures"]["tpot_under_encode_storm_over_solo_with_core_share"] > 0
    assert saved["env"]["kind"].startswith("simulated")
    assert saved["figures"]["same_tokens/(E-P)-D"] == 1.0
    assert "same_tokens/(E-P)-D" in capsys.readouterr().out
