"""Has a stage sample tokens that its client has of another stage, so that its answer goes on after them.

A logits processor of vLLM's (`--logits-processors`, at all that decode): it leaves no choice where the request's
`kv_transfer_params` name the token. The stage's pass over it stays, and all that hangs on it: a seeded generator draws
once, a grammar advances, penalties count it, parsers see it. Named are P's first token, and all tokens of an answer
that is replayed; those that can be part of the prompt instead the scheduler has taken out (`go_on.py`).

vLLM has two interfaces for such classes, of its two model runners, and takes a class by its base: this one has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from epd_serve.engine import compat
from epd_serve.kv.params import tokens_to_go_on_after

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


class _Slots:
    """What the second model runner tells: requests keep a slot, and their rows are others in every step.

    Args:
        requests: state of all slots, of which `prompt_len` is read.
    """

    def __init__(self, requests: Any) -> None:
        self.requests = requests
        self.tokens_of: dict[int, Sequence[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A slot's new request, which may be one that was preempted."""
        tokens = _tokens_in(sampling_params)
        self.tokens_of.pop(req_idx, None)
        if tokens:
            self.tokens_of[req_idx] = tokens
        return bool(tokens)


class ForcedTokens(_Slots, LogitsProcessor, compat.second_logits_processor()):  # type: ignore[misc]
    """Forces the first tokens of requests that have some to go on after.

    Args:
        where: of the first model runner, a device and whether its memory is pinned; of the second one, its requests.
    """

    def __init__(self, vllm_config: VllmConfig, *where: Any) -> None:
        _Slots.__init__(self, where[0])
        self._forced: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # by row: tokens, and the output so far
        compat.spare_output_ids(vllm_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._forced, batch_update, _forced)
        for row in [row for row, (tokens, output) in self._forced.items() if len(output) >= len(tokens)]:
            del self._forced[row]

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """`logits` [rows, vocabulary], changed in place. What later stages subtract from 0 leaves it the largest."""
        rows = _next_tokens(self._forced) if ctx is None else _rows(self, ctx)
        for row, token in rows.items():
            logits[row].fill_(float("-inf"))
            logits[row, token] = 0.0
        return logits


def _next_tokens(forced: dict[int, tuple[Sequence[int], Sequence[int]]]) -> dict[int, int]:
    """Tokens by row. Of the output so far only the length is looked at, which placeholders tell as well."""
    return {row: tokens[len(output)] for row, (tokens, output) in forced.items() if len(output) < len(tokens)}


def _rows(slots: _Slots, ctx: Any) -> dict[int, int]:
    """Tokens by row, of those requests of which the model sees no more than the prompt and a part of their tokens."""
    if not slots.tokens_of:
        return {}
    rows = {}
    seen = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
    for row, (slot, length) in enumerate(seen):
        tokens = slots.tokens_of.get(slot, ())
        number = max(0, length - int(slots.requests.prompt_len.np[slot]))
        if number < len(tokens):
            rows[row] = tokens[number]
    return rows


def _forced(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    """What is kept of a request that enters the batch; `output` grows with what it generates."""
    tokens = _tokens_in(params)
    return (tokens, output) if tokens else None


def _tokens_in(params: SamplingParams) -> list[int]:
    return tokens_to_go_on_after((params.extra_args or {}).get("kv_transfer_params"))
