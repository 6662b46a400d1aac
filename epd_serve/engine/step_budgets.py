"""vLLM's scheduler, held to the budgets of its steps (`epd_serve/budgets.py`): where an SLO is named.

Two limits of vLLM's own are set before each step: `max_num_scheduled_tokens`, which has room for every decode beside
the prompts' budget, and `max_num_encoder_input_tokens`. vLLM gives out tokens in the order of `running`, so decodes are
put first; and it never encodes an item that is larger than the limit, so one such item is let through where the budgets
say so.

Each limit stays vLLM's where it would keep a request waiting for ever: that of tokens without chunked prefill, where an
item must not be cut or chunks end at the blocks of a state-space model; that of items where features come from an
encoder, because vLLM counts those as well.
"""

from __future__ import annotations

import functools
from typing import Any

from epd_serve.budgets import Budgets
from epd_serve.engine.neighbours import Neighbours
from epd_serve.wiring import StageWiring

SHARED_FROM_TOKENS = 512
"""A prompt with more to compute leaves others their parts of a step."""


def share_steps(scheduler: Any) -> None:
    """Have a long prompt leave room in a step to those that come after it, and have all of it while it is alone: vLLM's
    adaptive threshold, unless the operator set one. For stages that only prefill: vLLM counts those that decode, too.
    vLLM 0.23 has a threshold that holds for one alone as well, and so none is set there."""
    config = scheduler.scheduler_config
    if hasattr(scheduler, "adaptive_long_prefill_threshold") and not config.long_prefill_token_threshold:
        scheduler.adaptive_long_prefill_threshold = bool(config.enable_chunked_prefill)
        if scheduler.adaptive_long_prefill_threshold:
            config.long_prefill_token_threshold = min(SHARED_FROM_TOKENS, scheduler.max_model_len)


def shared_tokens(scheduler: Any) -> int:
    """`StageReport.shared_tokens` of vLLM's scheduler."""
    shares = getattr(scheduler, "adaptive_long_prefill_threshold", False)
    return int(scheduler.scheduler_config.max_num_batched_tokens) if shares else 0


def _is_prefilled(request: Any) -> bool:
    """Whether more than the next token is still to be computed."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)


@functools.cache
def with_budgets(base: Any) -> Any:
    """vLLM's scheduler class `base`, which keeps its steps within an SLO."""

    class Budgeted(base):
        budgets: Budgets | None = None
        max_num_scheduled_tokens: int
        max_num_encoder_input_tokens: int

        def hold_to_slo(self, wiring: StageWiring) -> None:
            """To be called once it is made. Nothing changes where no SLO is named."""
            if not wiring.slo_ttft_s or self.is_encoder_decoder:
                return
            self._own_tokens, self._own_items = self.max_num_scheduled_tokens, self.max_num_encoder_input_tokens
            config = self.scheduler_config
            self._cuts_prompts = (
                wiring.role.has_language_model
                and config.enable_chunked_prefill
                and not config.disable_chunked_mm_input
                and not self.need_mamba_block_aligned_split
            )
            self._counts_items = wiring.role.encodes
            self._neighbours = Neighbours(wiring) if wiring.role.sends_features and wiring.peers else None
            self._to_encode: dict[str, Any] = {}  # requests with items, in order of arrival, until all are encoded
            self.budgets = Budgets(
                wiring.slo_ttft_s,
                wiring.slo_tpot_s,
                most_tokens=self._own_tokens,
                most_items=self._own_items,
                prefills=wiring.role.has_language_model,
            )

        def schedule(self, *args: Any, **more: Any) -> Any:
            if self.budgets is not None:
                self._set_limits(self.budgets)
            output = super().schedule(*args, **more)
            if self.budgets is not None and self.max_num_scheduled_tokens < self._own_tokens:
                self.budgets.held += any(map(_is_prefilled, reversed(self.running)))
            return output

        def shutdown(self) -> None:
            if self.budgets is not None and self._neighbours is not None:
                self._neighbours.close()
            super().shutdown()

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            if self.budgets is not None and self._counts_items and request.mm_features:
                self._to_encode[request.request_id] = request

        def finish_requests(self, *args: Any, **more: Any) -> Any:
            result = super().finish_requests(*args, **more)
            if self.budgets is not None:
                for name in [name for name, one in self._to_encode.items() if one.is_finished()]:
                    del self._to_encode[name]
            return result

        def _set_limits(self, budgets: Budgets) -> None:
            if self._neighbours is not None and (step_s := self._neighbours.decode_step_s()) is not None:
                budgets.neighbour(step_s)
            prefills = list(filter(_is_prefilled, self.running))
            begun = len(self.running) - len(prefills)
            if begun == len(self.requests):
                self.max_num_scheduled_tokens = self._own_tokens
                return
            if prefills and self.running[begun:] != prefills:
                self.running.sort(key=_is_prefilled)
            decodes = sum(one.max_tokens > 1 for one in self.running[:begun])  # a P's and an E's are about to leave
            limits = budgets.limits(decodes, sum(map(self._ready_tokens, prefills)), self._next_item())
            if self._cuts_prompts:
                room = begun * (1 + self.num_spec_tokens) + limits.tokens
                self.max_num_scheduled_tokens = min(self._own_tokens, room)
            if self._counts_items:
                self.max_num_encoder_input_tokens = max(1, limits.items)  # 0 would look untouched for ever

        def _ready_tokens(self, request: Any) -> int:
            """Of this prompt, up to its first item that is to be encoded."""
            left = request.num_tokens - request.num_computed_tokens
            found = self._first_to_encode(request) if self._counts_items else None
            if found is None:
                return int(left)
            return max(0, request.mm_features[found].mm_position.offset - request.num_computed_tokens)

        def _next_item(self) -> int:
            for name, request in list(self._to_encode.items()):
                here = self.requests.get(name) is request  # not one that has ended, however it did
                if here and (found := self._first_to_encode(request)) is not None:
                    return int(request.get_num_encoder_embeds(found))
                del self._to_encode[name]  # should it be preempted, its items are in nobody's sight, and within limits
            return 0

        def _first_to_encode(self, request: Any) -> int | None:
            done, cached = request.num_computed_tokens, self.encoder_cache_manager.cached
            for index, feature in enumerate(request.mm_features):
                at = feature.mm_position
                if at.offset + at.length > done and feature.identifier not in cached:
                    return index
            return None

        def _try_schedule_encoder_inputs(
            self, request: Any, num_computed_tokens: int, num_new_tokens: int, budget: int, *args: Any, **more: Any
        ) -> Any:
            if self.budgets is not None and self._counts_items:
                untouched = budget == self.max_num_encoder_input_tokens  # nothing is encoded in this step so far
                if untouched and self.budgets.last.oversize:
                    budget = max(budget, self._size_of_first(request, num_computed_tokens + num_new_tokens))
            return super()._try_schedule_encoder_inputs(
                request, num_computed_tokens, num_new_tokens, budget, *args, **more
            )

        def _size_of_first(self, request: Any, before: int) -> int:
            """Tokens of the first item that is to be encoded, if the step comes to it."""
            found = self._first_to_encode(request)
            if found is None or request.mm_features[found].mm_position.offset >= before:
                return 0
            return min(int(request.get_num_encoder_embeds(found)), self._own_items)

    Budgeted.__name__ = f"Budgeted{base.__name__}"
    return Budgeted
