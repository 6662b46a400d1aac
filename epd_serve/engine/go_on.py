"""Answers that began on another stage, gone on with fast: the tokens that the client has become part of the prompt.

They are computed in one prefill. All behind the scheduler sees an ordinary request with a longer prompt: the prefix
cache, transfers of KV, preemption, positions of media. The API server knows nothing of it: the first output of such a
request brings the tokens that it began with, so that text, stop strings and usage are those of a whole answer.

What hangs on how tokens were sampled does not go on like that: grammars, logprobs. Such requests, and those that say
`replay`, keep their tokens, and the logits processor forces them (`forced_tokens.py`).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from epd_serve.kv.params import tokens_to_go_on_after
from epd_serve.wire import GOES_ON_AFTER, REPLAY


@functools.cache
def going_on(base: Any) -> Any:
    """vLLM's scheduler class `base`, which takes requests that go on after tokens."""

    class GoingOn(base):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._begun: dict[str, tuple[list[int], int]] = {}  # until the first output: tokens, the prompt's before

        def add_request(self, request: Any) -> None:
            given = tokens_to_go_on_after(getattr(request, "kv_transfer_params", None))
            if given and request.request_id not in self.requests and _can_be_prompt(self, request, len(given)):
                self._begun[request.request_id] = (given, request.num_prompt_tokens)
                _lengthen_prompt(request, given)
            super().add_request(request)

        def update_from_output(self, *args: Any, **more: Any) -> Any:
            result = super().update_from_output(*args, **more)
            if self._begun:
                for output in (each for several in result.values() for each in several.outputs):
                    self._complete(output)
            return result

        def finish_requests(self, *args: Any, **more: Any) -> Any:
            result = super().finish_requests(*args, **more)
            for name in [name for name in self._begun if _is_over(self.requests.get(name))]:
                del self._begun[name]
            return result

        def _complete(self, output: Any) -> None:
            """Put the tokens that its request began with before those of the first output. A failure has none."""
            given, prompt_tokens = self._begun.pop(output.request_id, ((), 0))
            if not given or not output.new_token_ids:
                return
            output.new_token_ids = [*given, *output.new_token_ids]
            if stats := output.prefill_stats:  # usage has no more cached tokens than the prompt has tokens
                stats.num_cached_tokens = min(stats.num_cached_tokens, prompt_tokens)

    GoingOn.__name__ = f"GoingOn{base.__name__}"
    return GoingOn


def _can_be_prompt(scheduler: Any, request: Any, given: int) -> bool:
    """Whether `given` tokens can become part of its prompt, and leave something to generate."""
    params = request.sampling_params
    if params is None or request.kv_transfer_params.get(REPLAY) or request.resumable or scheduler.is_encoder_decoder:
        return False
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return False
    if request.structured_output_request is not None or params.logprobs is not None:
        return False
    if params.prompt_logprobs is not None or request.num_prompt_tokens + given >= scheduler.max_model_len:
        return False
    of_prefill = "transfer_id" in request.kv_transfer_params and "peer" not in request.kv_transfer_params
    return of_prefill or given < request.max_tokens  # P is to sample one token, however many there are


def _lengthen_prompt(request: Any, given: list[int]) -> None:
    """Before the scheduler knows it. The list of all its tokens stays the same one, because a view of it is handed out;
    its prompt and its sampling params may be the API server's."""
    del request.kv_transfer_params[GOES_ON_AFTER]  # the logits processor sees the same params
    request.prompt_token_ids = [*request.prompt_token_ids, *given]
    request.num_prompt_tokens += len(given)
    request._all_token_ids.extend(given)
    request.block_hashes = []
    request.update_block_hashes()
    params = request.sampling_params = copy.copy(request.sampling_params)
    request.max_tokens = params.max_tokens = max(1, request.max_tokens - len(given))
    params.min_tokens = max(0, params.min_tokens - len(given))


def _is_over(request: Any) -> bool:
    return request is None or request.is_finished()
