"""A plan on round numbers: the right answer is known by hand, and what is said of it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.cli.command import main
from deploy.options.config import build_config
from deploy.plan.blueprint import draw
from deploy.planner.candidates import bound_rps, candidates, fits
from deploy.planner.choice import Plan, Question, _ask, _candidates, _screen, plan
from deploy.planner.fleet import Options
from deploy.planner.goodput import CLOSE, Goal, Interval, goodput, part_of
from deploy.planner.plot import picture_of_plan
from deploy.planner.profile import DeviceProfile, write_device_profile
from deploy.planner.simulate import simulate
from deploy.planner.told import deployment, options_of, reasons, text, verdict
from deploy.planner.workload import Work, workload_of
from epd_serve.errors import ConfigError
from epd_serve.image_tokens import ByArea
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.slo import Slo
from epd_serve.traffic import Item, Request, write_traffic

STAGE = Profile(
    encode=Line(0.0, 0.001),
    prefill=Line(0.0, 0.001),
    decode_step_s=((1, 0.050), (2, 0.054)),
    capacity=Capacity(max_running=16, step_tokens=2048, kv_tokens=500_000, encoder_tokens=2048),
)
PROFILE = DeviceProfile("m", "none", {1: STAGE}, front=Line(0.01), handover=Line(0.002), kv=Line(0.002))
"""Stages that share a device take turns."""
IMAGES, TEXT = "images=1@560x560,text=20,output=20", "text=100,output=20"
LONG = "images=1@560x560,text=20,output=120"


def planned(workload: str, slo: Slo, devices: int = 2, profile: DeviceProfile = PROFILE, **more: Any) -> Plan:
    goal = Goal(workload_of(workload, ByArea()), slo)
    return plan(Question(goal, profile, devices, **{"seeds": 2, **more}), processes=1)


def test_text_within_a_loose_slo_is_a_monoliths() -> None:
    found = planned(TEXT, Slo(3000, 1000))
    assert found.monolith_will_do
    assert verdict(found).startswith("A monolith serves this ")


def test_long_answers_of_which_hardly_a_gap_may_be_long_ask_for_a_decoder_apart() -> None:
    """Of 119 gaps one may be longer: a monolith's breaks with the second prompt that comes, a D's is the first one."""
    found = planned(LONG, Slo(8000, 120, "p99"), seeds=3)
    assert "D" in {member.role.value for member in found.first.layout.members()} and not found.monolith_will_do
    assert found.monolith is not None and found.first.per_device.value > 2 * found.monolith.per_device.value
    assert verdict(found).startswith((f"{found.first.layout} serves this best", "Undecided"))
    assert "2EPD does: there gaps between tokens grow too long beyond that" in "".join(reasons(found))


def test_an_encoder_that_has_most_of_the_work_gets_most_of_the_devices() -> None:
    slow = replace(PROFILE, stages={1: replace(STAGE, encode=Line(0.0, 0.005))})
    found = planned(IMAGES, Slo(9000, 200), 6, slow, layouts=("4E-P-D", "2E-2P-2D", "E-4P-D"))
    assert str(found.first.layout) == "4E-P-D"


def test_equal_layouts_are_undecided_and_the_simpler_one_is_named() -> None:
    found = planned(TEXT, Slo(3000, 1000), layouts=("TP1x2", "2PD"))
    assert found.monolith_will_do and found.first.per_device.meets(found.choices[1].per_device)


def test_with_a_rate_as_few_devices_as_will_do() -> None:
    few, many = (planned(TEXT, Slo(3000, 1000), 2, rate_rps=rate) for rate in (0.2, 4.5))
    assert few.first.devices == 1 < many.first.devices and few.first.enough and many.first.enough
    none = planned(TEXT, Slo(3000, 1000), 1, rate_rps=4000.0)
    assert not none.first.enough and verdict(none).startswith("No layout of 1 devices serves 4000 requests/s")


def test_what_survives_a_loss_counts() -> None:
    found = planned(TEXT, Slo(3000, 1000), 3, survive=1, layouts=("TP1x3", "2P-D"))
    assert str(found.first.layout) == "3EPD" and found.first.survived.value < found.first.goodput.value
    assert found.choices[1].survived.value == 0, "nobody decodes any more"


def test_an_slo_that_one_request_alone_breaks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layout of 2 devices serves anything within TTFT ≤ 5 ms"):
        planned(TEXT, Slo(5, 50))


@settings(max_examples=15, deadline=None)
@given(devices=st.integers(1, 7), items=st.integers(0, 2), tokens=st.integers(50, 900), output=st.integers(1, 300))
def test_more_devices_of_a_family_are_never_worse_by_their_bound(
    devices: int, items: int, tokens: int, output: int
) -> None:
    work = Work(items, items * tokens, items * tokens + 30, output)
    for layout in ("TP1x{}", "(E-PD)x{}", "(E-P-D)x{}"):
        one, more = (bound_rps(parse(layout.format(count)), PROFILE, work) for count in (devices, devices + 1))
        assert one < more
    kept = candidates(devices, PROFILE, work)
    assert all(one.layout.device_count == devices for one in kept) and any(one.monolith for one in kept)


@pytest.mark.parametrize("layout", ["TP1x2", "(E-PD)x2", "E-PD", "EP-D", "(E-P)-D", "E-P-D", "(E-PD)-PD"])
def test_no_layout_serves_more_than_its_bound(layout: str) -> None:
    goal = Goal(workload_of(IMAGES, ByArea()), Slo(60_000, 5000))
    bound = bound_rps(parse(layout), PROFILE, goal.workload.work)
    requests = goal.workload.at(4 * bound, 400, 1)
    assert 400 / simulate(parse(layout), PROFILE, requests).span_s < 1.05 * bound


def test_a_layout_of_equal_parts_serves_what_its_parts_do() -> None:
    assert part_of(parse("48EPD")) == (parse("4EPD"), 12)
    assert part_of(parse("(E-P)x6-2D")) == (parse("(E-P)x3-D"), 2)
    assert part_of(parse("3E-2P-2D")) == (parse("3E-2P-2D"), 1)
    goal = Goal(workload_of(TEXT, ByArea()), Slo(2000, 1000))
    four, eight = (goodput(goal, parse(f"TP1x{count}"), PROFILE, 4.0, 1) for count in (4, 8))
    assert eight == pytest.approx(2 * four, rel=0.06)


@pytest.mark.parametrize("layout", ["TP1x2", "EP-D"])
def test_a_run_that_ends_once_it_is_certain_has_the_verdict_of_a_whole_one(layout: str) -> None:
    goal, verdicts = Goal(workload_of(IMAGES, ByArea()), Slo(3000, 80)), set()
    for rate in (0.5, 1.0, 1.2, 1.4, 1.6, 2.0, 4.0):
        whole = goal.attained(goal.run(parse(layout), PROFILE, rate, 1, Options())) >= goal.share
        assert goal.met(parse(layout), PROFILE, rate, 1, Options()) == whole
        verdicts.add(whole)
    assert verdicts == {True, False}


def test_one_run_says_that_a_layout_serves_less_than_is_of_interest(monkeypatch: pytest.MonkeyPatch) -> None:
    met, rates = Goal.met, []

    def seen(goal: Goal, layout: Layout, profile: DeviceProfile, rate_rps: float, *more: Any) -> bool:
        rates.append(rate_rps)
        return met(goal, layout, profile, rate_rps, *more)

    monkeypatch.setattr(Goal, "met", seen)
    goal = Goal(workload_of(TEXT, ByArea()), Slo(2000, 1000))
    question = Question(goal, PROFILE, 1, layouts=("TP1",), seeds=1)
    (one,) = _candidates(question)
    _ask(question)
    assert _screen((one, 40.0)) == 0.0 and rates == [40.0 / CLOSE]
    assert _screen((one, 1.0)) == _screen((one, 0.0)) > 1.0, "of the others all is found as without it"


def test_large_spaces_are_cut_into_parts() -> None:
    kept = candidates(64, PROFILE, Work(1, 400, 430, 60))
    assert 5 < len(kept) < 40 and all(one.layout.device_count == 64 for one in kept)


def test_an_interval_is_of_nine_cases_in_ten() -> None:
    assert Interval.of([2.0]) == Interval(2.0, 2.0, 2.0)
    assert Interval.of([1.0, 3.0]).low == 0.0 and Interval.of([1.9, 2.0, 2.1]).high == pytest.approx(2.169, abs=0.01)
    assert Interval(1.0, 0.9, 1.1).widened(0.1) == Interval(1.0, pytest.approx(0.81), pytest.approx(1.21))


@pytest.mark.parametrize(
    ("workload", "said"),
    [("images=1,text=3", "'images=1' is none of"), ("text=0", "text and output from 1 on"), ("", "'' is none of")],
)
def test_a_workload_of_neither_form_is_refused(workload: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        workload_of(workload, ByArea())


def test_a_shape_is_as_it_is_written_and_equal_for_equal_seeds() -> None:
    shape = workload_of("images=0-2@560x280,text=10-20,output=5", ByArea())
    made = shape.at(2.0, 400, 1)
    assert made == shape.at(2.0, 400, 1) != shape.at(2.0, 400, 2)
    assert {len(one.items) for one in made} == {0, 1, 2} and {one.output_tokens for one in made} == {5}
    assert {item.tokens for one in made for item in one.items} == {200}
    assert all(10 <= one.text_tokens <= 20 for one in made) and made[-1].at_s == pytest.approx(200, rel=0.2)


def test_a_recording_keeps_its_order_and_takes_another_rate(tmp_path: Path) -> None:
    own = [Request(f"r{n}", 100 + n * n, 50, 5, (Item(20, key="k"),), session=f"s{n % 2}") for n in range(10)]
    write_traffic(tmp_path / "t.jsonl", own)
    traffic = workload_of(f"recorded:{tmp_path / 't.jsonl'}", ByArea())
    assert traffic.rate_rps == pytest.approx(9 / 81)
    twice = traffic.at(1.0, 20, 0)
    assert twice[9].at_s == pytest.approx(9.0) and twice[19].at_s == pytest.approx(19.0)
    assert twice[1].at_s == pytest.approx(1 / 9), "its bursts"
    assert twice[0].session != twice[10].session and twice[0].items[0].key != twice[10].items[0].key
    assert traffic.at(1.0, 20, 3) != twice


# --- as a user --------------------------------------------------------------------------------------------------------


def asked(tmp_path: Path, *words: str, profile: DeviceProfile = PROFILE) -> int:
    write_device_profile(tmp_path / "profile.json", profile)
    usual = ["--profile", str(tmp_path / "profile.json"), "--workload", IMAGES, "--devices", "2", "--seeds", "2"]
    return main(["plan", *usual, "--processes", "1", *words])


def test_the_command_tells_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, told, drawn = tmp_path / "deployment.yaml", tmp_path / "plan.json", tmp_path / "plan.svg"
    words = ["--slo", "4000:80", "--price", "2", "--out", str(out), "--json", str(told), "--picture", str(drawn)]
    assert asked(tmp_path, *words) == 0
    said = capsys.readouterr().out
    config, found = build_config({}, str(out)), json.loads(told.read_text())
    first = found["choices"][0]
    assert said.startswith(found["verdict"]) and f"  {first['layout']} " in said and "per 1,000" in said
    assert config.layout == first["layout"] and (config.slo.ttft_s, config.slo.tpot_s) == (4.0, 0.08)
    assert config.planned.attainment == pytest.approx(first["attained"], rel=1e-3)
    assert first["cost_per_1000"] == pytest.approx(2 * 2 / 3.6 / first["survived_rps"]["value"])
    assert ElementTree.fromstring(drawn.read_text()).tag.endswith("svg")


def test_batches_and_budgets_of_the_first_choice_are_in_the_file() -> None:
    steep = replace(PROFILE, stages={1: replace(STAGE, decode_step_s=((1, 0.05), (2, 0.06)))})
    found = planned(TEXT, Slo(3000, 150), profile=steep, layouts=("TP1x2",))
    content = yaml.safe_load(deployment(found, "/a/model"))
    one = found.first
    assert (content["step_budgets"] == "on") == (one.options.budgets is not None) and content["model"] == "/a/model"
    assert ("stage_args" in content) == bool(one.options.max_running)
    assert "budgets" in text(found) or one.options.budgets is None
    assert str(one.layout) in picture_of_plan(found)


def test_a_choice_is_run_with_the_objectives_it_was_chosen_by() -> None:
    slo = Slo(3000, 150, "mean")
    found = planned(TEXT, slo, layouts=("TP1x2",))
    words = options_of(found.first, found.question)

    settings_told = {word for flag, word in pairwise(words) if flag == "--proxy"}
    assert settings_told == {"slo.ttft_s=3.0", "slo.tpot_s=0.15", "slo.judge=mean"}


FREE = replace(
    PROFILE,
    weight_bytes={"E": {1: 2}, "P": {1: 10}, "D": {1: 10}, "PD": {1: 10}, "EP": {1: 10}, "EPD": {1: 10}},
    encoder_free_kv_tokens={1: 500_000},
)


def test_stages_without_the_encoder_have_its_memory_for_kv() -> None:
    free = FREE.without_encoder()
    assert free.weight_bytes == FREE.weight_bytes | {"P": {1: 8}, "D": {1: 8}, "PD": {1: 8}}
    assert free.stages[1] == replace(STAGE, capacity=replace(STAGE.capacity, kv_tokens=1_000_000))
    assert free.without_encoder() == free
    tight = replace(free, memory_bytes=20)
    assert [fits(parse(text).groups[0], tight) for text in ("(E-P)-D", "(E-P-D)")] == [True, False]
    assert fits(parse("(P-D)").groups[0], tight) and not fits(parse("(P-D)").groups[0], replace(FREE, memory_bytes=20))


def test_more_kv_makes_larger_batches_and_serves_more() -> None:
    """A request holds 21 blocks of KV: one, and without the encoder four at a time."""
    small = replace(STAGE, capacity=replace(STAGE.capacity, kv_tokens=1000))
    profile = replace(FREE, stages={1: small}, encoder_free_kv_tokens={1: 2000})
    goal = Goal(workload_of("images=1@560x560,text=20,output=200", ByArea()), Slo(5000, 100))
    layout = parse("E-PD")
    with_it, without = (goodput(goal, layout, one, 0.1, 0, Options()) for one in (profile, profile.without_encoder()))
    assert without > 1.5 * with_it


@given(devices=st.integers(2, 5))
@settings(deadline=None)
def test_without_the_encoder_nobody_but_an_encoder_encodes(devices: int) -> None:
    work = workload_of(IMAGES, ByArea()).work
    found = {str(one.layout) for one in candidates(devices, FREE.without_encoder(), work, more=9)}
    every = candidates(devices, FREE, work, more=9)
    assert found == {str(one.layout) for one in every if one.layout.roles <= {Role.E, Role.P, Role.D, Role.PD}}


@pytest.mark.parametrize("layout", ["2EPD", "EP-D", "E-PD-EPD", "P-D"])
def test_a_layout_in_which_others_encode_is_refused_by_name(layout: str) -> None:
    with pytest.raises(ConfigError, match="--encoder-free: .*" + re.escape(layout)):
        planned(IMAGES, Slo(5000, 100), profile=FREE.without_encoder(), layouts=(layout,))


def test_a_plan_without_the_encoder_is_one_that_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, told = tmp_path / "deployment.yaml", tmp_path / "plan.json"
    words = [
        "--encoder-free",
        "--layouts",
        "E-PD,(E-PD)x2",
        "--seeds",
        "1",
        "--slo",
        "5000:100",
        "--out",
        str(out),
        "--json",
        str(told),
    ]
    assert asked(tmp_path, *words, profile=FREE) == 0
    said, found = capsys.readouterr().out, json.loads(told.read_text())
    assert "With --encoder-free: P, D and PD load no encoder" in said and found["encoder_free"]
    config = build_config({"device": "cpu"}, str(out))
    blueprint = draw(config)
    assert config.encoder_free and str(blueprint.layout) == found["choices"][0]["layout"]
    assert all("--language-model-only" in blueprint.stage_args.of(one) for one in blueprint.plans if one.id[0] != "E")
    free = planned(IMAGES, Slo(5000, 100), profile=FREE.without_encoder(), layouts=("E-PD",), seeds=1)
    assert "--encoder-free" in options_of(free.first, free.question)


@pytest.mark.parametrize(
    ("profile", "words", "said"),
    [
        (FREE, ["--layouts", "EP-D"], "EP of EP-D encodes beside the language model"),
        (FREE, ["--layouts", "TP1x2"], "TP (EPD) of 2EPD encodes"),
        (FREE, ["--workload", TEXT], f"nothing of {TEXT} is to be encoded"),
        (PROFILE, [], "how much more KV a stage holds without the encoder at tp1"),
        (replace(FREE, versions={"vllm": "0.23.1"}), [], "vLLM 0.23 takes no item without its pixels"),
    ],
)
def test_what_does_not_go_without_the_encoder_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: DeviceProfile, words: list[str], said: str
) -> None:
    assert asked(tmp_path, "--encoder-free", *words, profile=profile) == 2
    told = capsys.readouterr().err
    assert "--encoder-free: " in told and said in told


def test_text_is_planned_for_a_model_that_resizes_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", TEXT, "--layouts", "TP1x2", "--slo", "5000:100", "--seeds", "1"]
    assert asked(tmp_path, *words) == 0, capsys.readouterr().err


def test_a_family_whose_items_need_their_pixels_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["InternVLChatModel"]}')
    assert asked(tmp_path, str(tmp_path), "--encoder-free", profile=FREE) == 2
    assert "--encoder-free: InternVLChatModel: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "--devices is 0: 1 or more"),
        (["--slo", "1"], "write TTFT:TPOT"),
        (["--slo", "1:2,3:4"], "a plan is for one objective"),
        (["--share", "1.5"], "--share is 1.5: at most 1"),
        (["--rate", "0"], "--rate is 0: above 0"),
        (["--layouts", "E-D"], "E encodes"),
        (["--layouts", "TP2"], "the profile has sizes 1"),
        (["--run"], "--run serves what --out FILE says"),
        (["--workload", "recorded:none.jsonl"], "none.jsonl: No such file"),
        (["--profile", "none.json"], "profile none.json"),
        (["nowhere"], "nowhere is no model directory"),
    ],
)
def test_a_wrong_word_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert asked(tmp_path, *words) == 2
    assert said in capsys.readouterr().err
