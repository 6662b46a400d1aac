"""A profile from steps: those of a stage whose times are known give them back."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deploy.planner.assemble import assembled
from deploy.planner.plot import picture_of_profile
from deploy.planner.profile import DeviceProfile
from deploy.planner.steps import Part, Sent, Step, beside, read_steps, slowdown
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.trace import STEP, Trace

TRUE = Profile(
    encode=Line(0.004, 0.0002),
    encode_context_s=1e-7,
    prefill=Line(0.003, 0.00005),
    prefill_context_s=2e-8,
    decode_step_s=((1, 0.004), (16, 0.01)),
    decode_kv_s=1e-7,
)
BARE = DeviceProfile("m", "d", {1: Profile(kv_bytes_per_token=1000)}, slowdown={"encode+decode": 1.7})
FRONT_S, HANDOVER_S, KV_S = 0.01, 0.005, 0.002


def step(instance: str, begun_s: float, items: int = 0, prompt: int = 0, decodes: int = 0, before: int = 0) -> Step:
    """One that takes what `TRUE` says. `before`: tokens before the prompt's, or of each that decodes."""
    context, kv = (prompt * before + prompt * (prompt - 1) // 2, before * decodes)
    seconds = sum(TRUE.step_parts_s(items, prompt, decodes, context_tokens=context, kv_tokens=kv))
    return Step(instance, begun_s, begun_s + seconds, prompt, items, decodes, items**2, context, kv)


def decodes(instance: str, begun_s: float) -> list[Step]:
    works = itertools.product((1, 16), (32, 200, 1000, 2000), range(3))
    return [step(instance, begun_s + at, decodes=batch, before=before) for at, (batch, before, _) in enumerate(works)]


def alone(apart: bool) -> Part:
    """Prompts and pictures one at a time, then decodes: on E and PD, or on a monolith."""
    steps: list[Step] = []
    sent: list[Sent] = []
    for at, prompt in enumerate((16, 64, 256, 1024)):
        steps.append(step("PD0" if apart else "EPD0", 10.0 * at, prompt=prompt))
        sent.append(Sent(steps[-1].begun_s - FRONT_S, steps[-1].ended_s))
        steps.append(step(steps[-1].instance, 10.0 * at + 5, prompt=prompt, before=2048))
    for at, items in enumerate((25, 100, 400, 1000)):
        begun_s = 100.0 + 10 * at
        if apart:
            steps.append(step("E0", begun_s, items=items))
            steps.append(step("PD0", steps[-1].ended_s + HANDOVER_S, prompt=items + 14))
        else:
            steps.append(step("EPD0", begun_s, items=items, prompt=items + 14))
        sent.append(Sent(begun_s - FRONT_S, steps[-1].ended_s))
    steps += decodes("PD0" if apart else "EPD0", 200.0)
    return Part("alone", "E-PD" if apart else "TP1", 1, 20.0, steps, sent, [(0, 0.004), (400, 0.008)], 5000, 16, 4096)


@pytest.mark.parametrize("apart", [True, False])
def test_what_a_stage_takes_is_found(apart: bool) -> None:
    found = assembled(BARE, [alone(apart)], cpu=True)
    stage = found.stages[1]
    for line, true in ((stage.encode, TRUE.encode), (stage.prefill, TRUE.prefill)):
        assert (line.setup_s, line.per_unit_s) == pytest.approx((true.setup_s, true.per_unit_s), rel=0.01)
    assert (stage.encode_context_s, stage.prefill_context_s) == pytest.approx((1e-7, 2e-8), rel=0.01)
    assert stage.decode_kv_s == pytest.approx(1e-7, rel=0.01)
    assert [seconds for _, seconds in stage.decode_step_s] == pytest.approx([0.004, 0.01], rel=0.01)
    assert stage.capacity == Capacity(16, 1024, 5000, max_model_len=4096, encoder_tokens=1024)
    assert found.front.seconds(100) == pytest.approx(FRONT_S, rel=0.01)
    assert found.handover.seconds(100) == pytest.approx(HANDOVER_S if apart else 0.0, rel=0.01)
    assert found.front_busy.seconds(200) == pytest.approx(0.006) and found.start_s == 20.0
    assert found.slowdown == {"encode+decode": 1.7} and "prefill 0.0%" in found.comment
    assert assembled(BARE, [alone(apart)], cpu=False).front_busy == Line()
    assert "<polyline" in picture_of_profile(found) and "nan" not in picture_of_profile(found)


def test_kv_is_what_the_request_waits_for_after_its_prefill() -> None:
    steps, sent = [], []
    for at, prompt in enumerate((100, 1000)):
        first = step("P0", float(at), prompt=prompt)
        then = step("D0", first.ended_s + KV_S + 1e-6 * prompt, prompt=1, before=prompt - 1)
        steps += [first, then]
        sent.append(Sent(first.begun_s - 0.1, then.ended_s + 0.1, tokens=4))
    found = assembled(BARE, [Part("encode+prefill", "(E-P)-D", 1, 1.0, steps, sent)], cpu=True)
    assert (found.kv.setup_s, found.kv.per_unit_s) == pytest.approx((KV_S, 1e-6), rel=0.01)
    assert found.stages == BARE.stages, "no part has told what a stage takes"


def side_by_side(slower: float) -> list[Step]:
    """Ten steps of each alone, then E and P side by side without a pause."""
    steps = [Step("E0", at, at + 0.1, item_tokens=50) for at in range(10)]
    steps += [Step("P0", at + 0.5, at + 0.7, 512) for at in range(10)]
    for number in range(20):
        steps.append(Step("E0", 20 + 0.1 * slower * number, 20 + 0.1 * slower * (number + 1), item_tokens=50))
    for number in range(10):
        steps.append(Step("P0", 20 + 0.2 * slower * number, 20 + 0.2 * slower * (number + 1), 512))
    return sorted(steps, key=lambda one: one.begun_s)


@pytest.mark.parametrize("slower", [1.0, 1.4, 2.0])
def test_neighbours_are_as_slow_as_both_become(slower: float) -> None:
    assert slowdown(side_by_side(slower), "encode", "prefill") == pytest.approx(slower, rel=0.01)
    part = Part("encode+prefill", "(E-P)-D", 1, 1.0, side_by_side(slower))
    assert assembled(BARE, [part], cpu=True).slowdown["encode+prefill"] == pytest.approx(slower, rel=0.01)


def test_kinds_that_never_met_say_nothing_of_each_other() -> None:
    assert slowdown(side_by_side(2.0)[:20], "encode", "prefill") is None


def test_a_step_goes_on_until_the_next_one_that_follows_at_once(tmp_path: Path) -> None:
    for name, begins in (("D0", (0.0, 0.041, 0.2)), ("D1", (0.0405,))):
        trace = Trace(str(tmp_path / f"{name}.jsonl"), name)
        for begun_s in begins:
            trace.stamp("", STEP, t=begun_s + 0.04, t0=begun_s, prompt_tokens=0, item_tokens=0, decodes=1)
        trace.close()
    steps = read_steps(tmp_path)
    assert [step.seconds for step in steps] == pytest.approx([0.041, 0.04, 0.04, 0.04])


def two_devices(slower: float) -> list[Step]:
    """Ten decode steps alone, ten while the other device encodes, ten while an encoder of the same device does."""
    steps = [Step("PD1", 0.1 * at, 0.1 * at + 0.04, decodes=1) for at in range(10)]
    for begun_s, encoder, times in ((10.0, "E0", slower), (20.0, "E1", 2.0)):
        steps.append(Step(encoder, begun_s, begun_s + 5, item_tokens=900))
        steps += [
            Step("PD1", at_s, at_s + 0.04 * times, decodes=1)
            for at_s in (begun_s + 0.1 * number for number in range(10))
        ]
    return sorted(steps, key=lambda one: one.begun_s)


@pytest.mark.parametrize("slower", [1.0, 1.12])
def test_what_another_device_takes_from_a_step_is_told_from_what_a_neighbour_takes(slower: float) -> None:
    found = {"decode beside encode": pytest.approx(slower)}
    assert beside(two_devices(slower)) == found, "encodes met decodes for a fraction of their time"
    part = Part("beside", "(E-PD)x2", 1, 1.0, two_devices(slower))
    assert assembled(BARE, [part], cpu=True).beside == found
    assert beside(two_devices(slower)[10:]) == {}, "nothing to hold them against"
