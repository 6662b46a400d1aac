"""Requests that go on after tokens: to vLLM's scheduler a longer prompt, to its API server one whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine.go_on import going_on

BLOCK = 4
MAX_MODEL_LEN = 64
PROMPT = [11, 12, 13, 14, 15, 16]


class View(Sequence[int]):
    """vLLM's `ConstantList`: of the very list that it was made of."""

    def __init__(self, of: list[int]) -> None:
        self._of = of

    def __getitem__(self, index: Any) -> Any:
        return self._of[index]

    def __len__(self) -> int:
        return len(self._of)


class Request:
    """vLLM's, the part that tells of tokens. Hashes are of whole blocks, made once each, in order."""

    def __init__(self, name: str = "r", *, transfer: dict[str, Any] | None = None, **more: Any) -> None:
        self.request_id = name
        self.sampling_params = SimpleNamespace(max_tokens=10, min_tokens=0, logprobs=None, prompt_logprobs=None)
        vars(self.sampling_params).update(extra_args={"kv_transfer_params": transfer})
        self.kv_transfer_params = transfer
        self.prompt_token_ids: Any = PROMPT
        self.prompt_embeds: Any = None
        self.prompt_is_token_ids: Any = None
        self.structured_output_request: Any = None
        self.resumable = False
        for key, value in more.items():
            setattr(self.sampling_params if hasattr(self.sampling_params, key) else self, key, value)
        self.max_tokens = self.sampling_params.max_tokens
        self.num_prompt_tokens = len(PROMPT)
        self._all_token_ids = list(PROMPT)
        self.all_token_ids = View(self._all_token_ids)
        self.block_hashes: list[tuple[int, ...]] = []
        self.update_block_hashes()
        self.state = "WAITING"

    def update_block_hashes(self) -> None:
        for end in range((len(self.block_hashes) + 1) * BLOCK, len(self._all_token_ids) + 1, BLOCK):
            self.block_hashes.append(tuple(self._all_token_ids[:end]))

    def is_finished(self) -> bool:
        return self.state == "FINISHED"


class VllmScheduler:
    """vLLM's, the part between arrival and output."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.seen: list[int] = []
        self.max_model_len = MAX_MODEL_LEN
        self.is_encoder_decoder = False

    def add_request(self, request: Request) -> None:
        assert request.num_prompt_tokens == len(request.prompt_token_ids or PROMPT) == len(request.all_token_ids)
        assert len(request.block_hashes) == len(request.all_token_ids) // BLOCK
        self.requests[request.request_id] = request

    def update_from_output(self, step: object, sampled: dict[str, list[int]]) -> dict[int, SimpleNamespace]:
        outputs = [output(name, tokens) for name, tokens in sampled.items()]
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, names: list[str], status: object, *, keeps: bool = False) -> None:
        for name in names:
            self.requests[name].state = "FINISHED"
            if not keeps:  # until a connector has sent its KV
                del self.requests[name]


def output(name: str, tokens: list[int]) -> SimpleNamespace:
    stats = SimpleNamespace(num_cached_tokens=8)
    return SimpleNamespace(request_id=name, new_token_ids=tokens, prefill_stats=stats)


def made() -> Any:
    return going_on(VllmScheduler)()


def after(*tokens: int, **more: Any) -> dict[str, Any]:
    return {"goes_on_after": list(tokens), **more}


def said(scheduler: Any, name: str, *tokens: int) -> list[int]:
    (outputs,) = scheduler.update_from_output(None, {name: list(tokens)}).values()
    (one,) = outputs.outputs
    return list(one.new_token_ids)


def test_given_tokens_are_prompt_and_stand_in_the_first_output_alone() -> None:
    scheduler, request = made(), Request(transfer=after(21, 22, 23), min_tokens=5)
    theirs = request.sampling_params
    scheduler.add_request(request)
    assert request.prompt_token_ids == [*PROMPT, 21, 22, 23] == list(request.all_token_ids)
    assert request.block_hashes[-1] == (*PROMPT, 21, 22)
    assert (request.max_tokens, request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (7, 7, 2)
    assert len(PROMPT) == 6 and theirs.max_tokens == 10, "the API server's own"
    assert said(scheduler, "r", 24) == [21, 22, 23, 24] and said(scheduler, "r", 25) == [25]


def test_the_logits_processor_is_left_nothing_to_force() -> None:
    transfer = after(21, transfer_id="t", peer={})
    request = Request(transfer=transfer)
    made().add_request(request)
    assert request.sampling_params.extra_args["kv_transfer_params"] == {"transfer_id": "t", "peer": {}}


def test_no_more_tokens_are_said_to_be_cached_than_the_clients_prompt_has() -> None:
    scheduler = made()
    scheduler.add_request(Request(transfer=after(21, 22, 23)))
    (outputs,) = scheduler.update_from_output(None, {"r": [24]}).values()
    assert outputs.outputs[0].prefill_stats.num_cached_tokens == len(PROMPT)


def test_prefill_samples_one_token_however_many_are_given() -> None:
    request = Request(transfer=after(21, 22, transfer_id="t"), max_tokens=1, min_tokens=1)
    made().add_request(request)
    assert (request.num_prompt_tokens, request.max_tokens, request.sampling_params.min_tokens) == (8, 1, 0)


STAYS: dict[str, dict[str, Any]] = {
    "no tokens": {"transfer": {"transfer_id": "t"}},
    "no params": {},
    "none of them": {"transfer": after()},
    "to be replayed": {"transfer": after(21, replay=True)},
    "a grammar": {"transfer": after(21), "structured_output_request": object()},
    "logprobs": {"transfer": after(21), "logprobs": 0},
    "logprobs of the prompt": {"transfer": after(21), "prompt_logprobs": 0},
    "a prompt of embeddings": {"transfer": after(21), "prompt_token_ids": None, "prompt_embeds": object()},
    "a prompt of both": {"transfer": after(21), "prompt_is_token_ids": [True]},
    "a session": {"transfer": after(21), "resumable": True},
    "an answer that is complete": {"transfer": after(*range(10)), "max_tokens": 10},
    "decode's one token": {"transfer": after(21, transfer_id="t", peer={}), "max_tokens": 1},
    "no room": {"transfer": after(*range(MAX_MODEL_LEN - len(PROMPT))), "max_tokens": 100},
}


@pytest.mark.parametrize("name", STAYS)
def test_what_cannot_go_on_like_that_is_left_to_the_logits_processor(name: str) -> None:
    scheduler, request = made(), Request(**STAYS[name])
    before = dict(request.kv_transfer_params or {})
    scheduler.add_request(request)
    assert request.num_prompt_tokens == len(PROMPT) and (request.kv_transfer_params or {}) == before
    assert said(scheduler, "r", 24) == [24]


def test_pooling_requests_and_encoder_decoders_are_left_alone() -> None:
    scheduler, pooling = made(), Request(transfer=after(21))
    vars(pooling)["sampling_params"] = None
    scheduler.add_request(pooling)
    scheduler.is_encoder_decoder = True
    translating = Request("other", transfer=after(21))
    scheduler.add_request(translating)
    assert pooling.num_prompt_tokens == translating.num_prompt_tokens == len(PROMPT)


def test_a_failure_before_the_first_token_says_nothing() -> None:
    scheduler = made()
    scheduler.add_request(Request(transfer=after(21)))
    assert said(scheduler, "r") == []


@pytest.mark.parametrize("keeps", [False, True])
def test_one_that_is_aborted_before_its_first_output_leaves_nothing(keeps: bool) -> None:
    scheduler = made()
    for name in ("r", "other"):
        scheduler.add_request(Request(name, transfer=after(21)))
    scheduler.finish_requests(["r"], None, keeps=keeps)
    scheduler.requests.pop("r", None)
    scheduler.add_request(Request("r"))
    assert said(scheduler, "r", 24) == [24] and said(scheduler, "other", 24) == [21, 24]
