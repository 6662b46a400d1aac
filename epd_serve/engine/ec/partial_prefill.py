"""Prefill up to the first image that is still awaited: where vLLM's scheduler is made to stop, and who may begin so.

The way is vLLM's own for an encoder budget that is used up: `_try_schedule_encoder_inputs` answers with fewer tokens,
and the request goes on in a later step. Ours asks it about the tokens before the awaited item only, so nothing of that
item is looked up, promised or encoded. `ensure_cache_available`, which vLLM asks before, says whether there are any:
with none, vLLM 0.32 would let nobody in who waits behind that request.

What begun requests hold must not keep others from running, because an encoder may wait for room that these have pinned
(`features.py`). So one request at a time begins like that, and only where its KV and that of any other request fit
side by side, and that of the one that is ahead of D (`kv/prefill_scheduler.py`). Complete requests therefore always get
in, as before.

Off, with a line in the log, where it is not known to be right: without chunked prefill; with speculative decoding (a
drafter looks ahead of the chunk) or state-space layers (chunks end at their blocks); for encoder-decoder models.
Requests with a seed wait for all their items: vLLM takes back what a chunk has drawn from a request's own generator,
and torch cannot do that on CPUs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epd_serve.engine.compat import cuts_before_items
from epd_serve.wiring import StageWiring

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpareBlocks:
    """KV blocks beyond what one request of maximal length takes.

    Attributes:
        block_sizes: tokens of a block, for each group of layers that has blocks of its own.
    """

    spare: int
    block_sizes: tuple[int, ...]

    @classmethod
    def beside(cls, max_tokens: int, *, blocks: int, block_sizes: tuple[int, ...]) -> SpareBlocks:
        """Of `blocks` in all."""
        return cls(blocks - _blocks(max_tokens, block_sizes), block_sizes)

    def fit(self, tokens: int) -> bool:
        return _blocks(tokens, self.block_sizes) <= self.spare

    @property
    def worth_tokens(self) -> int:
        """Fewer tokens are not worth a step."""
        return max(self.block_sizes)


def _blocks(tokens: int, block_sizes: tuple[int, ...]) -> int:
    return sum(-(-tokens // size) for size in block_sizes)


@functools.cache
def with_partial_prefill(base: Any) -> Any:
    """vLLM's scheduler class `base`, which stops before an item that its EC connector still waits for."""

    class PartialPrefill(base):
        _consumer: Any = None  # of its EC connector, where it applies

        def allow_early_begins(self, wiring: StageWiring) -> None:
            """To be called once it is made: who may begin before all that it waits for is there holds blocks meanwhile.
            Nothing changes where neither applies."""
            sender = getattr(getattr(self, "connector", None), "prefill_scheduler", None)
            ahead_tokens = sender.allow_ahead(_spare_blocks(self).fit) if sender is not None else 0
            if not (wiring.partial_prefill and wiring.role.takes_features and wiring.prefills):
                return
            if self.ec_connector is None:  # in a layout without encoders no features travel
                return
            spare = _spare_blocks(self, ahead_tokens)
            if hindrance := next(_hindrances(self, spare), ""):
                logger.info("prefill waits for all images of a request: %s", hindrance)
                return
            self._consumer = self.ec_connector.consumer
            self._consumer.allow_partial(spare)

        def awaits_feature(self, request: Any) -> bool:
            """Whether this request, which runs, may have nothing to compute until a feature is here."""
            return self._consumer is not None and bool(self._consumer.runs_partially(request))

        def _try_schedule_encoder_inputs(
            self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: Any, **more: Any
        ) -> Any:
            if self._consumer is not None:
                num_new_tokens = self._consumer.tokens_before_awaited(request, num_computed_tokens, num_new_tokens)
            return super()._try_schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, *args, **more)

    PartialPrefill.__name__ = f"PartialPrefill{base.__name__}"
    return PartialPrefill


def _hindrances(scheduler: Any, spare: SpareBlocks) -> Iterator[str]:
    if not cuts_before_items():
        yield "this vLLM schedules items in another way"
    if not scheduler.scheduler_config.enable_chunked_prefill:
        yield "chunked prefill is off"
    if scheduler.vllm_config.speculative_config is not None:
        yield "speculative decoding is on"
    if scheduler.need_mamba_block_aligned_split:
        yield "chunks of this model end at blocks"
    if scheduler.is_encoder_decoder:
        yield "this is an encoder-decoder model"
    if getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs) < 2:
        yield "one request runs at a time"
    if spare.spare <= 0:
        yield "the KV cache holds no more than one request of maximal length"


def _spare_blocks(scheduler: Any, ahead_tokens: int = 0) -> SpareBlocks:
    """`ahead_tokens`: of another request that may hold blocks while it waits, for D's."""
    cache = scheduler.kv_cache_manager
    kept_free = getattr(cache, "watermark_blocks", 0) + 1  # one block of vLLM's own is never used
    block_sizes = tuple(group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups)
    return SpareBlocks.beside(
        scheduler.max_model_len,
        blocks=scheduler.cache_config.num_gpu_blocks - kept_free - _blocks(ahead_tokens, block_sizes),
        block_sizes=block_sizes,
    )
