"""What two answers to one question say of each other."""

from __future__ import annotations

import pytest

from bench.model_check.memory import parse_cache_info
from bench.model_check.verdict import Answer, Verdict, judge, read_answer

PLAIN = Answer(200, tokens=(5, 6, 7), text="abc", margins=(3.0, 0.2, 4.0), prompt_tokens=9)


def like_plain(**changes: object) -> Answer:
    return PLAIN._replace(**changes)


@pytest.mark.parametrize(
    ("ours", "plain", "verdict"),
    [
        (like_plain(), PLAIN, Verdict.EQUAL),
        (like_plain(tokens=[5, 6, 7]), PLAIN, Verdict.EQUAL),
        (like_plain(tokens=(5, 8, 7)), PLAIN, Verdict.NEAR_TIE),
        (like_plain(tokens=(5, 6, 8)), PLAIN, Verdict.DIFFERENT),
        (like_plain(tokens=(5, 6)), PLAIN, Verdict.DIFFERENT),
        (like_plain(tokens=(5, 8, 7)), like_plain(margins=()), Verdict.DIFFERENT),
        (like_plain(prompt_tokens=10), PLAIN, Verdict.DIFFERENT),
        (like_plain(tokens=()), PLAIN, Verdict.EQUAL),
        (like_plain(tokens=(), text="abd"), PLAIN, Verdict.DIFFERENT),
        (Answer(400, "no audio"), Answer(400, "no audio"), Verdict.NOT_TAKEN),
        (Answer(400, "no audio"), PLAIN, Verdict.REFUSED),
        (Answer(503, "no instance"), PLAIN, Verdict.FAILED),
        (PLAIN, Answer(0, "ConnectError"), Verdict.FAILED),
    ],
)
def test_a_difference_counts_where_plain_vllm_was_clear(ours: Answer, plain: Answer, verdict: Verdict) -> None:
    assert judge(ours, plain)[0] is verdict


def test_what_has_to_be_explained_says_why() -> None:
    assert judge(like_plain(tokens=(5, 6, 8)), PLAIN)[1] == "token 2: plain vLLM's best is 4.00 above its second"
    assert judge(Answer(503, "no instance"), PLAIN)[1] == "EPD-Serve: 503 no instance"


def test_margins_are_those_of_the_two_best_in_any_order() -> None:
    tops = [{"logprob": -2.5}, {"logprob": -0.5}]
    choice = {"message": {"content": "a"}, "token_ids": [3], "logprobs": {"content": [{"top_logprobs": tops}]}}
    answer = read_answer(200, {"choices": [choice], "usage": {"prompt_tokens": 4}})
    assert answer == Answer(200, tokens=(3,), text="a", margins=(2.0,), prompt_tokens=4)


def test_an_error_is_kept_in_the_servers_words() -> None:
    assert read_answer(400, {"error": {"message": "no audio here"}}) == Answer(400, "no audio here")


def test_tokens_of_kv_cache_are_blocks_times_their_size() -> None:
    text = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0\n'
    assert parse_cache_info(text) == {"engine 0": 3200}
    assert parse_cache_info('vllm:cache_config_info{block_size="32",num_gpu_blocks="None"} 1.0') == {}
