"""What vLLM's scheduler is told about a request of a consumer: whether it may run, and up to which of its items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.partial_prefill import SpareBlocks
from epd_serve.engine.ec.request_facts import item_keys, items_ahead, must_not_recompute, not_encoded

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request


class FeatureAdmission:
    """Belongs to the scheduler's thread; never blocks.

    Args:
        keeps: whether this instance decodes a request: it needs its features, should it preempt it.
        reserves: whether another instance prefills it for this one, which has to hold no blocks for it before that one
            can begin.
        can_fail: vLLM can be told to fail a request.
        media_is_absent: whether some of these items came without their media.
    """

    def __init__(
        self,
        consumer: FeatureConsumer,
        *,
        keeps: Callable[[Request], bool],
        reserves: Callable[[Request], bool],
        can_fail: bool,
        media_is_absent: Callable[[list[Any]], bool],
    ) -> None:
        self._consumer = consumer
        self._keeps = keeps
        self._reserves = reserves
        self._reserved: set[str] = set()  # requests that were let through
        self._can_fail = can_fail
        self._media_is_absent = media_is_absent
        self._must_not_recompute: dict[str, bool] = {}  # by request
        self._spare: SpareBlocks | None = None
        self._awaited_at: int | None = None  # where the request that was asked about last has to stop

    def allow_partial(self, spare: SpareBlocks) -> None:
        """From now on a request may run up to its first item that is not here, where it fits in these blocks."""
        self._spare = spare

    def arrived(self, request: Request) -> None:
        """Called by our scheduler class. Whatever a request that is computed here waits for first, its features are
        looked for now."""
        if request.mm_features and not self._reserves(request):
            self._consumer.arrived(item_keys(request))

    def may_run(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether there is something of it to compute. Asked at every step; what is not here is looked for."""
        items = items_ahead(request, num_computed_tokens)
        if not items:
            if self._reserves(request) and self._is_early(request):
                return False
            self._consumer.passed(request.request_id)
            if self._keeps(request) and self._has_to_fail(request):
                self._consumer.keep(request.request_id, item_keys(request))
            return True
        settled = self._consumer.settled(
            request.request_id,
            [item.identifier for item in items],
            must_not_recompute=self._has_to_fail(request),
            worth=self._worth(request, items, num_computed_tokens),
        )
        if settled != len(items) and (missing := not_encoded(request)):
            self._consumer.give_up(missing, "not_encoded")
        self._awaited_at = items[settled].mm_position.offset if settled is not None and settled < len(items) else None
        return settled is not None

    def tokens_before_awaited(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many of these tokens can be computed now. Asks anew: 0.23 does not, for requests that run."""
        if not self.runs_partially(request):
            return num_new_tokens
        if not self.may_run(request, num_computed_tokens):
            return 0
        if self._awaited_at is None:
            return num_new_tokens
        return min(num_new_tokens, self._awaited_at - num_computed_tokens)

    def runs_partially(self, request: Request) -> bool:
        """Whether it has begun although one of its features was not here, and may still not be."""
        return self._consumer.runs_partially(request.request_id)

    def forget(self, requests: Iterable[str]) -> None:
        """These have finished."""
        for request in requests:
            self._must_not_recompute.pop(request, None)
            self._reserved.discard(request)

    def _is_early(self, request: Request) -> bool:
        """Whether D has to wait with a new request, of which it computes nothing, until P can begin with it."""
        if request.request_id in self._reserved:
            return False
        given_up = not_encoded(request)
        if self._consumer.held_back(request.request_id, [key for key in item_keys(request) if key not in given_up]):
            return True
        self._reserved.add(request.request_id)
        return False

    def _worth(self, request: Request, items: Sequence[MultiModalFeatureSpec], num_computed_tokens: int) -> int | None:
        """With how many of the items ahead the request may begin before the others are here."""
        seeded = request.sampling_params is not None and request.sampling_params.seed is not None
        if self._spare is None or seeded or self._reserves(request) or not self._spare.fit(request.num_tokens):
            return None
        worth_it = num_computed_tokens + self._spare.worth_tokens
        return next((index for index, item in enumerate(items) if item.mm_position.offset >= worth_it), None)

    def _has_to_fail(self, request: Request) -> bool:
        """If a feature is lost."""
        known = self._must_not_recompute.get(request.request_id)
        if known is None:
            known = self._can_fail and (must_not_recompute(request) or self._media_is_absent(request.mm_features))
            self._must_not_recompute[request.request_id] = known
        return known
