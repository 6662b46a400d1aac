"""Which flags let P and D answer together: the same meaning is the same text, and what nobody knows counts."""

from __future__ import annotations

import pytest

from epd_serve.answer_flags import answer_flags, parses_chat


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ([], ()),
        (["--max-num-seqs", "8", "--enforce-eager", "--block_size=16"], ()),
        (["--seed", "-1"], ("--seed -1",)),
        (["--seed=1", "--seed", "2"], ("--seed 2",)),
        (["--generation_config=vllm"], ("--generation-config vllm",)),
        (["--override-generation-config.temperature", "0"], ("--override-generation-config.temperature 0",)),
        (["--chat-template", "x", "--max-num-seqs", "8"], ("--chat-template x",)),
        (["--default-chat-template-kwargs", '{"b": 1,  "a": 2}'], ('--default-chat-template-kwargs {"a": 2, "b": 1}',)),
        (["-q", "fp8"], ("--quantization fp8",)),
        (["--something-new"], ("--something-new",)),
    ],
)
def test_what_may_shape_an_answer_is_kept_in_one_form(words: list[str], flags: tuple[str, ...]) -> None:
    assert answer_flags(words) == flags


@pytest.mark.parametrize(
    "words",
    [["--speculative-config", "{}"], ["--speculative_config.method=ngram"], ["--logits-processors", "a:B"]],
)
def test_where_no_token_can_be_forced_a_stage_answers_alone(words: list[str]) -> None:
    assert answer_flags(words) is None


@pytest.mark.parametrize(
    ("words", "parses"),
    [
        (["--reasoning-parser", "qwen3"], True),
        (["--tool-call-parser=hermes", "--enable-auto-tool-choice"], True),
        (["--chat-template", "x"], False),
    ],
)
def test_parsers_are_known_by_their_flags(words: list[str], parses: bool) -> None:
    assert parses_chat(answer_flags(words) or ()) is parses
