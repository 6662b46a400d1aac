"""Prompts made by hand have the length and the seed that were asked for."""

from __future__ import annotations

import pytest

from bench.workloads.synthetic import demo_image, text_body
from epd_serve.sim.tokens import TOKEN_BYTES


@pytest.mark.parametrize("tokens", [1, 16, 500])
def test_a_prompt_has_its_length_and_its_seed(tokens):
    one, other = (text_body("m", tokens=tokens, answer=8, stream=False, seed=seed) for seed in (1, 2))

    assert len(one["messages"][0]["content"]) == tokens * TOKEN_BYTES
    assert (one["max_tokens"], one["stream"]) == (8, False)
    assert one != other


def test_what_a_demo_image_shows_is_the_same_at_any_size():
    assert demo_image(3, 64).answer == demo_image(3, 96).answer != ""
