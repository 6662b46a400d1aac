"""Requests of a workload: fixed by name and seed, lazy, with the reuse that was asked for."""

from __future__ import annotations

import collections
import hashlib
import itertools

import pytest

from bench.workloads.generate import Knobs, Words, requests
from bench.workloads.profiles import PROFILES, profile
from epd_serve.errors import ConfigError
from tests.bench.workloads.summary import summarise


def take(name, count, **knobs):
    return list(itertools.islice(requests(profile(name), Knobs(**knobs), Words()), count))


@pytest.mark.parametrize("name", PROFILES)
def test_the_same_name_and_seed_give_the_same_requests(name):
    assert take(name, 40, seed=3) == take(name, 40, seed=3)
    assert take(name, 40, seed=3) != take(name, 40, seed=4)
    assert take(name, 40, seed=3) == take(name, 60, seed=3)[:40]


def test_a_workload_is_the_same_on_every_machine():
    """Written down once: whoever changes this changes what earlier results were measured with."""
    parts = [str(take(name, 64, seed=1, reuse=0.3)) for name in PROFILES]

    assert hashlib.sha256("".join(parts).encode()).hexdigest()[:16] == "f8700e7a99df090c"


def test_requests_are_made_when_they_are_asked_for():
    assert next(requests(profile("multi-image-4k"), Knobs(), Words())).id == "multi-image-4k-0-0"


@pytest.mark.parametrize("reuse", [0.0, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("name", ["sharegpt4o-like", "multi-image-4k", "azure-bursty"])
def test_reuse_is_the_share_of_occurrences_that_repeat(name, reuse):
    found = summarise(take(name, 512, reuse=reuse))

    assert found["reuse"] == pytest.approx(reuse, abs=0.03)


def test_reuse_changes_nothing_but_pictures():
    fresh, again = take("azure-bursty", 200), take("azure-bursty", 200, reuse=0.6)

    assert [(one.id, one.text, len(one.images)) for one in fresh] == [
        (one.id, one.text, len(one.images)) for one in again
    ]
    kept = [new == old for one, other in zip(fresh, again, strict=True)
            for new, old in zip(one.images, other.images, strict=True)]  # fmt: skip
    assert 0.35 < sum(kept) / len(kept) < 0.45


@pytest.mark.parametrize("name", ["multi-image-4k", "azure-bursty"])
def test_a_request_never_has_a_picture_twice(name):
    for request in take(name, 200, reuse=0.8):
        assert len(set(request.images)) == len(request.images)


def test_zipf_makes_a_few_pictures_popular():
    popular, even = (
        collections.Counter(one.images[0] for one in take("sharegpt4o-like", 600, reuse=0.5, zipf=zipf))
        for zipf in (1.2, 0.0)
    )

    assert popular.most_common(1)[0][1] > 3 * even.most_common(1)[0][1]


def test_a_repeated_picture_is_the_same_reference():
    shown = [one.images[0] for one in take("sharegpt4o-like", 100, reuse=0.5)]

    assert len({one.key for one in shown}) == len(set(shown)) < 60


def test_pictures_and_answers_can_be_set_for_any_workload():
    found = take("azure-bursty", 100, images=3, output_tokens=10)

    assert {len(one.images) for one in found} == {0, 3}
    assert {one.max_tokens for one in found} == {10}


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"reuse": 1.0}, "reuse is 1"),
        ({"reuse": -0.1}, "reuse is -0.1"),
        ({"reuse": float("nan")}, "reuse is nan"),
        ({"zipf": -1}, "zipf is -1"),
        ({"images": 0}, "--pictures-each is 0"),
        ({"output_tokens": 0}, "--output-tokens is 0"),
    ],
)
def test_a_knob_out_of_range_is_refused(knobs, says):
    with pytest.raises(ConfigError, match=says):
        Knobs(**knobs)
