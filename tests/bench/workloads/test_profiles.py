"""The workloads by name: a sample has what its sources print."""

from __future__ import annotations

import itertools
import math

import pytest

from bench.workloads.generate import Knobs, requests
from bench.workloads.profiles import PROFILES, profile
from epd_serve.errors import ConfigError
from tests.bench.workloads.summary import summarise

ALL = [pytest.param(one, id=one.name) for one in PROFILES.values()]


class NoWords:
    """Numbers are looked at here, texts take time."""

    def exactly(self, tokens, chance):
        return ""

    def count(self, text):
        return 0


def sample(one, count=None, **knobs):
    return list(itertools.islice(requests(one, Knobs(**knobs), NoWords()), count or one.count))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("one", ALL)
def test_a_sample_meets_every_published_number(one, seed):
    found = summarise(sample(one, seed=seed))

    for fact in one.facts:
        value = found[fact.statistic]
        if fact.sense == "==":
            assert math.isclose(value, fact.value, rel_tol=fact.within, abs_tol=1e-9), fact
        else:
            assert value >= fact.value if fact.sense == ">=" else value <= fact.value, fact


@pytest.mark.parametrize("one", ALL)
def test_every_number_has_a_source_or_is_said_to_be_chosen(one):
    assert one.source and one.chosen and one.facts
    assert all(fact.source for fact in one.facts)


def test_all_workloads_of_the_papers_are_there():
    assert list(PROFILES) == [
        "visualwebinstruct-like",
        "sharegpt4o-like",
        "multi-image-4k",
        "textcaps-like",
        "textvqa-like",
        "textvqa-1080p",
        "five-images-9k",
        "pope-like",
        "mme-like",
        "vizwiz-like",
        "azure-bursty",
        "images-short-answers",
        "long-prompts",
        "long-answers",
    ]


def test_answers_have_64_tokens_except_where_a_source_says_otherwise():
    assert {name: one.max_tokens for name, one in PROFILES.items() if one.max_tokens != 64} == {
        "textvqa-1080p": 256,
        "pope-like": 2,
        "mme-like": 2,
        "images-short-answers": 16,
        "long-answers": 192,
    }


def test_half_of_the_web_questions_have_no_picture_in_any_stretch():
    found = sample(profile("visualwebinstruct-like"), 320)

    for start in range(0, 320, 32):
        assert sum(not request.images for request in found[start : start + 32]) == 16


def test_sizes_of_photographs_spread_and_width_goes_with_height():
    shown = [request.images[0] for request in sample(profile("sharegpt4o-like"))]
    tall, wide = ([one for one in shown if keep(one)] for keep in (lambda p: p.height > p.width, lambda p: True))

    assert len({(one.width, one.height) for one in shown}) > 400
    assert 0.15 < len(tall) / len(wide) < 0.5
    large = [one.height for one in shown if one.width > 1000]
    small = [one.height for one in shown if one.width < 600]
    assert min(large) > 300 and sum(large) / len(large) > 2 * sum(small) / len(small)


def test_bursts_have_more_pictures_more_often_and_leave_the_mean_rate():
    found = sample(profile("azure-bursty"), 3200)
    burst, calm = ([one for one in found if (one.pace > 1) is wanted] for wanted in (True, False))

    assert summarise(burst)["images_mean"] > 3 * summarise(calm)["images_mean"]
    assert 0.2 < len(burst) / len(found) < 0.3
    assert sum(1 / request.pace for request in found) / len(found) == pytest.approx(1, rel=0.06)


@pytest.mark.parametrize("one", ALL)
def test_bursts_of_a_profile_are_normalised(one):
    length = sum(part.requests for part in one.traffic)

    assert sum(part.requests / part.pace for part in one.traffic) / length == pytest.approx(1)


def test_prompts_without_pictures_have_the_heavier_tail():
    found = sample(profile("azure-bursty"), 3200)
    long = [not request.images for request in found if request.text_tokens > 200]

    assert sum(long) / len(long) > 0.8
    assert max(request.text_tokens for request in found) <= 2048


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'sharegpt4o-like'"):
        profile("sharegpt4o")
    with pytest.raises(ConfigError, match="one of visualwebinstruct-like, "):
        profile("zzz")
