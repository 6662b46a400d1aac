"""`epd-bench colocation`: what is sent, what becomes of rounds, and the flow over simulated stages."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from bench import colocation
from bench.cli import main
from bench.colocation import check_memory, plan_of
from bench.colocation_figures import (
    StormRound,
    Versus,
    figures,
    layouts_table,
    ratio_table,
    ratios,
    storm_figures,
)
from bench.colocation_group import Plan
from bench.colocation_mix import Mix, Round, numbered_picture, round_of, tpot_s
from bench.flows import BROKEN, GOOD, Outcome
from bench.proxy_speed import simulated
from bench.statistic import Spread
from bench.storm import Storm
from deploy.config import DeployConfig
from epd_serve.errors import ConfigError, StageError
from tests.waiting import wait_for

MIX = Mix(requests=6, pictures=4, at_once=2, answer=3, side=64, prompt=8)


def kinds(bodies: list[dict[str, Any]]) -> list[str]:
    return ["text" if isinstance(body["messages"][0]["content"], str) else "picture" for body in bodies]


# --- what is sent


def test_a_round_is_the_same_for_every_layout_and_another_one_next_time():
    assert MIX.bodies("m", 3) == MIX.bodies("m", 3)
    assert kinds(MIX.bodies("m", 3)).count("picture") == 4
    first, second = (json.dumps(body) for seed in (3, 4) for body in MIX.bodies("m", seed)[:1])
    assert first != second


def test_no_picture_and_no_text_is_sent_twice():
    sent = [json.dumps(body["messages"]) for seed in range(20) for body in MIX.bodies("m", seed)]

    assert len(set(sent)) == len(sent)


def test_answers_are_exactly_so_long_and_greedy():
    for body in MIX.bodies("m", 0):
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (3, True, 0, True)
        assert body["return_token_ids"], "a token without text would be no event"


def test_pictures_differ_in_their_corner_pixels():
    pixels = {
        number: Image.open(io.BytesIO(base64.b64decode(numbered_picture(number, 64).partition(",")[2]))).tobytes()
        for number in (1, 5, 9)
    }

    assert len(set(pixels.values())) == 3 and {len(one) for one in pixels.values()} == {64 * 64 * 3}


# --- a round


def good(due: float, first: float, ended: float) -> Outcome:
    return Outcome("mix", due, first, ended, GOOD)


def test_a_round_takes_from_its_first_request_to_its_last_answer():
    one = round_of("TP1", 0, [good(0.5, 1.0, 2.0), good(1.0, 2.0, 2.5)], answer=3)

    assert one.seconds == 2.0 and one.tokens_per_s == 3.0
    assert one.ttft_s == (0.5, 1.0) and one.tpot_s == (0.5, 0.25)
    assert one.values() == {"tput": 3.0, "tpot": 0.375, "ttft": 0.75}


def test_time_per_output_token_leaves_the_first_one_out():
    assert tpot_s(good(0.0, 1.0, 1.9), tokens=10) == pytest.approx(0.1)


def test_a_round_with_a_bad_answer_is_none():
    broken = Outcome("mix", 0.0, 0.0, 1.0, BROKEN, "gone")

    with pytest.raises(StageError, match="TP1: 1 of 2 answers are not good, the first: broken: gone"):
        round_of("TP1", 0, [good(0.0, 1.0, 2.0), broken], answer=3)
    with pytest.raises(StageError, match="nothing was sent"):
        round_of("TP1", 0, [], answer=3)


# --- figures


def played(name: str, turn: int, seconds: float, tpot: float) -> Round:
    return Round(name, turn, seconds, 100, (0.1, 0.3), (tpot, tpot), 1.5, 0.02)


AGAINST = Versus("E_PD_over_TP1", "(E-PD)", "TP1")


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio():
    rounds = [
        played(name, turn, slow * seconds, slow * tpot)
        for turn, slow in enumerate((1.0, 5.0, 1.2))
        for name, seconds, tpot in (("TP1", 2.0, 0.02), ("(E-PD)", 4.0, 0.01))
    ]

    found = ratios(rounds, AGAINST)

    assert found["tput"] == Spread(0.5, 0.5, 0.5) and found["tpot"] == Spread(0.5, 0.5, 0.5)
    assert found["ttft"] == Spread(1.0, 1.0, 1.0)
    named = figures(rounds, (AGAINST,))
    assert named["tput_E_PD_over_TP1"] == named["tpot_E_PD_over_TP1_p75"] == 0.5
    assert named["TP1/tpot_ms"] == 24.0 and named["(E-PD)/cpu_s"] == 1.5
    assert "(E-PD)" in layouts_table(rounds)


def test_a_round_that_only_one_layout_played_is_left_out():
    rounds = [played("TP1", 0, 1.0, 1.0), played("(E-PD)", 0, 1.0, 1.0), played("TP1", 1, 9.0, 1.0)]

    assert ratios(rounds, AGAINST)["tput"] == Spread(1.0, 1.0, 1.0)


def test_the_storm_is_set_against_the_stream_alone_with_and_without_shares():
    storms = [
        StormRound(name, turn, slow * solo, slow * storm, encodes)
        for turn, slow in enumerate((1.0, 3.0))
        for name, solo, storm, encodes in (("plain", 0.01, 0.03, 8.0), ("shared", 0.02, 0.02, 4.0))
    ]

    found = storm_figures(storms, "plain", "shared")

    assert found["tpot_under_encode_storm_over_solo"] == pytest.approx(3.0)
    assert found["tpot_under_encode_storm_over_solo_with_core_share"] == 1.0
    assert found["tpot_solo_shares_over_none"] == 2.0
    assert found["tpot_under_encode_storm_shares_over_none"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["storm_encodes_shares_over_none"] == 0.5
    assert found["shared/storm_encodes_per_s"] == 4.0
    assert storm_figures([], "plain", "shared") == {}


def test_the_table_shows_the_papers_figures_beside_ours():
    shown = ratio_table({"tput_E_PD_over_TP1": 0.9, "tput_E_PD_over_TP1_p25": 0.8, "tput_E_PD_over_TP1_p75": 1.0})

    assert "0.90 (0.80–1.00)" in shown and "1.13-1.15" in shown


# --- command


def arguments(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    colocation.add_arguments(parser)
    return parser.parse_args(words)


def test_quick_cuts_rounds_and_requests_and_what_is_given_wins():
    assert plan_of(arguments()).rounds > plan_of(arguments("--quick")).rounds
    given = plan_of(arguments("--quick", "--rounds", "2", "--requests", "9", "--answer", "4"))
    assert given == Plan(Mix(9, 6, 6, 4), 2, 75.0, 8)


@pytest.mark.parametrize("wrong", ["--rounds", "--requests", "--at-once", "--answer"])
def test_numbers_that_measure_nothing_are_refused(capsys, wrong):
    assert main(["colocation", wrong, "0"]) == 1
    assert f"{wrong} 0: at least" in capsys.readouterr().err


def test_too_little_memory_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="100000 stages are up at a time"):
        check_memory(100_000)
    check_memory(0)


def test_the_layouts_and_their_flags_are_ones_that_the_launcher_takes():
    for entry in (entry for group in colocation.GROUPS.values() for entry in group):
        DeployConfig(layout=entry.layout, device="cpu")
        assert not entry.flags or entry.flags[0] == "--core-share"


# --- with simulated stages


def test_a_storm_is_encoded_picture_by_picture_and_ends_when_it_is_told_to():
    with simulated("E-PD") as launch:
        url = launch.stage_url("E")
        assert url is not None
        with Storm(url, launch.model, side=64, at_once=2) as storm:
            wait_for(lambda: storm.encoded >= 5 or storm.failed)
        assert storm.encoded >= 5 and storm.per_second > 0


def test_a_storm_that_is_refused_fails_loudly():
    with simulated("E-PD") as launch:
        url = launch.stage_url("E")
        assert url is not None
        with pytest.raises(StageError, match="in a storm of pictures: status 404"):
            with Storm(url, "another model", side=64, at_once=2) as storm:
                wait_for(lambda: storm.failed)


@pytest.mark.slow
def test_the_whole_flow_runs_on_simulated_stages(tmp_path, capsys):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"encode": {"setup_s": 0.002}, "decode_step_s": [[1, 0.001], [64, 0.002]]}))
    words = ["colocation", "--quick", "--engine", "sim", "--sim-profile", str(profile), "--rounds", "1"]
    words += ["--requests", "3", "--answer", "4", "--json", str(tmp_path / "r.json")]

    assert main(words) == 0

    saved = json.loads((tmp_path / "r.json").read_text())
    for name in ("tput_E_PD_over_TP1", "tpot_E_PD_over_TP1", "tput_E_P_D_over_EP_D"):
        assert saved["figures"][name] > 0
    assert saved["figures"]["tpot_under_encode_storm_over_solo"] > 0
    assert saved["figures"]["tpot_under_encode_storm_over_solo_with_core_share"] > 0
    assert saved["env"]["kind"].startswith("simulated")
    shown = capsys.readouterr().out
    assert saved["figures"]["same_tokens/(E-P)-D"] == 1.0
    assert "token for token" in shown and "What they cannot" in shown
