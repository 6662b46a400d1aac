"""The constants of openPangu-7B-VL on the 910B: what they are derived from holds, and they give what was not used."""

from __future__ import annotations

import itertools
import statistics

import pytest

from bench.workloads.generate import Knobs, requests, words
from bench.workloads.profiles import profile
from tests.soak.emulation import openpangu_vl_7b_910b as device
from tests.soak.emulation.device import CONSTANTS


def test_moments_are_those_of_the_workload():
    items, prompts = [], []
    for seed in range(16):
        for one in itertools.islice(requests(profile("sharegpt4o-like"), Knobs(seed), words(None)), 512):
            (picture,) = one.images
            items.append(round(picture.width / 28) * round(picture.height / 28))
            prompts.append(items[-1] + one.text_tokens)

    assert statistics.fmean(items) == pytest.approx(device.ITEM_TOKENS, rel=0.02)
    assert statistics.fmean(prompts) == pytest.approx(device.PROMPT_TOKENS, rel=0.02)
    assert statistics.fmean(n * n for n in items) == pytest.approx(device.ITEM_TOKENS_SQUARED, rel=0.06)
    assert statistics.fmean(n * n for n in prompts) == pytest.approx(device.PROMPT_TOKENS_SQUARED, rel=0.06)


def test_the_time_to_first_token_at_three_requests_a_second_follows_from_the_one_at_two():
    predicted_s = device.FRONT_S + device.ttft_without_front_s(3)

    assert predicted_s == pytest.approx(device.TTFT_S[3], rel=0.02)


def test_a_720p_picture_takes_about_what_the_makers_say():
    tokens = 1196

    assert tokens * (device.ENCODE_S_PER_TOKEN + device.PREFILL_S_PER_TOKEN) == pytest.approx(
        device.FIRST_TOKEN_720P_S, rel=0.1
    )


def test_the_decode_line_gives_back_both_rows_of_table_2():
    stages = device.DEVICE.stage()

    for rate, tpot_s in device.TPOT_S.items():
        batch = rate * 3 * 64 * tpot_s
        assert device.DECODE_S + device.DECODE_S_PER_SEQUENCE * batch == pytest.approx(tpot_s)
        assert stages.decode_s(round(batch)) == pytest.approx(tpot_s, rel=0.01)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_constant_can_be_varied_alone(constant):
    varied = device.DEVICE.scaled(constant, 1.3)

    assert [one for one in CONSTANTS if getattr(varied, one) != getattr(device.DEVICE, one)] == [constant]


def test_sharing_a_device_never_makes_faster():
    assert device.DEVICE.scaled("encode_slows_prefill", 0.1).profile().slows("encode", "prefill") == 1.0
