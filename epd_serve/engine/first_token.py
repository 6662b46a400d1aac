"""Has D sample the token that P has sampled after the prompt, so that D's answer goes on after what the client has.

A logits processor of vLLM's (`--logits-processors`, at D alone): it leaves no choice at the first token of a request
whose `kv_transfer_params` name one. D's pass over it stays, and all that hangs on it: a seeded generator draws once, a
grammar advances, penalties count it, parsers see it.

vLLM has two interfaces for such classes, of its two model runners, and takes a class by its base: this one has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from epd_serve.engine import compat
from epd_serve.wire import FIRST_TOKEN

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
        self.token_of: dict[int, int] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A slot's new request, which may be one that was preempted."""
        token = _token_in(sampling_params)
        self.token_of.pop(req_idx, None)
        if token is not None:
            self.token_of[req_idx] = token
        return token is not None


class FirstToken(_Slots, LogitsProcessor, compat.second_logits_processor()):  # type: ignore[misc]
    """Forces the first token of requests that have one to go on after.

    Args:
        where: of the first model runner, a device and whether its memory is pinned; of the second one, its requests.
    """

    def __init__(self, vllm_config: VllmConfig, *where: Any) -> None:
        _Slots.__init__(self, where[0])
        self._forced: dict[int, tuple[int, Sequence[int]]] = {}  # by row: the token, and the output so far
        compat.spare_output_ids(vllm_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._forced, batch_update, _forced)
        for row in [row for row, (_, output) in self._forced.items() if output]:  # it has been sampled
            del self._forced[row]

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """`logits` [rows, vocabulary], changed in place. What later stages subtract from 0 leaves it the largest."""
        rows = {row: token for row, (token, _) in self._forced.items()} if ctx is None else _rows(self, ctx)
        for row, token in rows.items():
            logits[row].fill_(float("-inf"))
            logits[row, token] = 0.0
        return logits


def _rows(slots: _Slots, ctx: Any) -> dict[int, int]:
    """Tokens by row, of those requests of which the model sees no more than the prompt."""
    if not slots.token_of:
        return {}
    seen = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
    return {
        row: slots.token_of[slot]
        for row, (slot, tokens) in enumerate(seen)
        if slot in slots.token_of and tokens <= slots.requests.prompt_len.np[slot]
    }


def _forced(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> tuple[int, list[int]] | None:
    """What is kept of a request that enters the batch; `output` grows with what it generates."""
    token = _token_in(params)
    return None if token is None else (token, output)


def _token_in(params: SamplingParams) -> int | None:
    transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
    token = transfer.get(FIRST_TOKEN)
    return token if isinstance(token, int) and not isinstance(token, bool) else None
