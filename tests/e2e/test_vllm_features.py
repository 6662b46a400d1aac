"""Features of vLLM that change how stages compute, switched on where KV is handed over: `epd_serve/engine/support.py`.

Prefill computes prompts in chunks, decode guesses by n-grams and keeps prefixes, both parse reasoning: the answers are
those of a plain vLLM that was started with the same flags.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_serve.demo.presets import builtin_model_dir
from epd_serve.phases.stamps import read_stamps
from tests.e2e.bodies import SOLO, Body, about, ask, fresh
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.serving import MODEL, Endpoint, Serving, plain_vllm, serving
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
CHUNK = 64  # tokens; a prompt about a picture has more
NGRAM = """--speculative-config '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}'"""
REASONING = "--reasoning-parser deepseek_r1"  # takes all for reasoning that no end of it follows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with the two tokens that a reasoning parser looks for, in the place of its two last ones."""
    folder = tmp_path_factory.mktemp("model") / "reasoning"
    shutil.copytree(builtin_model_dir(), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    old = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    for was, name in zip(old, ("<think>", "</think>"), strict=True):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": vocabulary[was], "content": name, **flags})
        vocabulary[name] = vocabulary.pop(was)
    gone = {*old, *("".join(pair) for pair in merges if set(pair) & set(old))}
    tokenizer["model"]["merges"] = [pair for pair in merges if "".join(pair) not in gone]
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def launch(model: Path) -> Iterator[Serving]:
    flags = ("all:" + REASONING, f"P:--max-num-batched-tokens {CHUNK}", f"D:{NGRAM}")
    words = (word for flag in flags for word in ("--stage-args", flag))
    with serving("E-P-D", str(model), "--served-model-name", MODEL, "--trace-dir", str(model.parent), *words) as made:
        yield made


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Endpoint]:
    with plain_vllm(model, *REASONING.split()) as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=["fp8"])
def quantised(request: pytest.FixtureRequest) -> Iterator[tuple[Serving, Endpoint]]:
    flag = f"--kv-cache-dtype {request.param}"
    with contextlib.ExitStack() as stack:
        launch = stack.enter_context(serving("P-D", "--stage-args", "all:" + flag))
        yield launch, stack.enter_context(plain_vllm(None, *flag.split()))


@pytest.mark.parametrize("name", SOLO)
def test_a_prompt_that_prefill_computes_in_chunks_arrives_whole(
    launch: Serving, plain: Endpoint, model: Path, name: str
) -> None:
    assert ask(launch, SOLO[name]) == ask(plain, SOLO[name])
    steps = [stamp.more["tokens"] for stamp in read_stamps(model.parent) if stamp.event == "prefill_step"]
    assert max(steps) <= CHUNK
    assert name != "a long prompt" or steps.count(CHUNK) >= 5, "the prompt was not computed in chunks"


def test_what_decode_guesses_by_ngrams_does_not_change_the_answer(launch: Serving, plain: Endpoint) -> None:
    body = about(PAIRWISE_DIFFERENT[1], max_tokens=120, ignore_eos=True)
    before = launch.stage("D0").metric("vllm:spec_decode_num_draft_tokens_total")
    assert ask(launch, body) == ask(plain, body)
    assert launch.stage("D0").metric("vllm:spec_decode_num_draft_tokens_total") > before


def test_prefill_sends_only_what_decode_does_not_hold(launch: Serving, plain: Endpoint) -> None:
    body = fresh(700)
    whole, rest = (sent_for(launch, plain, body) for _ in range(2))
    assert 0 < rest < whole


def sent_for(launch: Serving, plain: Endpoint, body: Body) -> float:
    """Bytes of KV that one request moved; its answer is checked."""
    transfers, sent = launch.metric("epd_kv_transfers_total"), launch.metric("epd_kv_bytes_total")
    assert ask(launch, body) == ask(plain, body)
    wait_for(lambda: launch.metric("epd_kv_transfers_total") > transfers, "the transfer to be reported", 15)
    return launch.metric("epd_kv_bytes_total") - sent


def test_reasoning_is_parsed_as_plain_vllm_parses_it(launch: Serving, plain: Endpoint) -> None:
    body = about(PAIRWISE_DIFFERENT[3])

    def message(endpoint: Endpoint) -> Any:
        found = endpoint.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        return {name: found.get(name) for name in ("content", "reasoning", "reasoning_content")}

    assert message(launch) == message(plain)
    parsed = message(launch)
    assert not parsed["content"] and (parsed["reasoning"] or parsed["reasoning_content"])


@pytest.mark.parametrize("name", ["text", "one picture", "a long prompt"])
def test_kv_of_one_byte_numbers_means_the_same_at_decode(quantised: tuple[Serving, Endpoint], name: str) -> None:
    launch, plain = quantised
    assert ask(launch, SOLO[name]) == ask(plain, SOLO[name])


def test_all_blocks_are_given_back(launch: Serving) -> None:
    for instance in ("P0", "D0"):
        wait_for(lambda instance=instance: launch.kv_blocks_in_use(instance) == 0, f"{instance} to be empty", 15)
