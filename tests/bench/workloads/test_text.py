"""Texts of an exact length."""

from __future__ import annotations

import sys

import pytest

from bench.workloads.distributions import seeded_rng
from bench.workloads.generate import OPENERS, WORDS, TokenizedWords, Words, words
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import ConfigError

LENGTHS = [1, 2, 9, 22, 63, 500]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_without_a_tokenizer_a_word_is_a_token(tokens):
    made = Words().exactly(tokens, seeded_rng("t"))

    assert len(made.split()) == Words().count(made) == tokens


@pytest.mark.parametrize("tokens", LENGTHS)
def test_with_a_tokenizer_the_count_is_exact(tokens):
    made = words(builtin_model_dir())

    assert [made.count(made.exactly(tokens, seeded_rng("t", turn))) for turn in range(5)] == [tokens] * 5


def test_a_text_is_fixed_by_its_chance():
    assert Words().exactly(20, seeded_rng("a")) == Words().exactly(20, seeded_rng("a"))
    assert Words().exactly(20, seeded_rng("a")) != Words().exactly(20, seeded_rng("b"))


def test_the_words_are_many_and_each_is_one_word():
    assert len(WORDS) > 300
    assert all(word.isalpha() for word in (*WORDS, *OPENERS))


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        words(tmp_path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        words(tmp_path)


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ConfigError, match="pip install tokenizers"):
        words(builtin_model_dir())


def test_a_length_that_a_tokenizer_cannot_make_is_an_error(monkeypatch):
    made = TokenizedWords(builtin_model_dir())
    monkeypatch.setattr(made, "count", lambda text: 2 * len(text.split()))
    monkeypatch.setattr("bench.workloads.generate.TRIES", 20)

    with pytest.raises(ConfigError, match="no text of exactly 3 tokens"):
        made.exactly(3, seeded_rng("t"))
