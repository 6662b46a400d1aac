"""What an engine has still to do, counted from the requests of vLLM's scheduler. Pure; its objects are only read.

A step that runs counts as done in vLLM's bookkeeping from the moment it is scheduled. Here it is pending until it ends
(`Work` of the steps in flight): one step of an encoder may take a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Position(Protocol):
    """Where an item's placeholder tokens lie in the prompt (`vllm.multimodal.inputs.PlaceholderRange`)."""

    offset: int
    length: int


class Feature(Protocol):
    """An item of a request (`MultiModalFeatureSpec`)."""

    identifier: str
    mm_position: Position


class Status(Protocol):
    name: str


class EngineRequest(Protocol):
    """`vllm.v1.request.Request`, the part that 0.23 and 0.32 share."""

    status: Status
    num_prompt_tokens: int
    num_computed_tokens: int
    mm_features: Sequence[Feature]

    def is_finished(self) -> bool: ...


class Step(Protocol):
    """`SchedulerOutput`."""

    num_scheduled_tokens: Mapping[str, int]
    scheduled_encoder_inputs: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Pending:
    """Requests by state, and tokens that are not scheduled yet."""

    waiting: int = 0
    running: int = 0
    prompt_tokens: int = 0
    item_tokens: int = 0


@dataclass(frozen=True)
class StepWork:
    """What one step does.

    Attributes:
        prompt_tokens, item_tokens: that it computes, encodes.
        decodes: requests for which it generates tokens after their first.
        item_pairs: sum, over those items, of their tokens squared.
        context_tokens: sum, over those prompt tokens, of those before each. kv_tokens: of the requests that decode.
    """

    prompt_tokens: int = 0
    item_tokens: int = 0
    decodes: int = 0
    item_pairs: int = 0
    context_tokens: int = 0
    kv_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.prompt_tokens or self.item_tokens or self.decodes)


def pending(requests: Iterable[EngineRequest], *, encoded: Callable[[str], bool] | None) -> Pending:
    """Count unfinished requests.

    Args:
        encoded: whether the engine's encoder cache has the item of this identifier; None where items come from
            elsewhere, so that none of their tokens is this engine's to encode.
    """
    waiting = running = prompt_tokens = item_tokens = 0
    for request in requests:
        if request.is_finished():  # its blocks are still being sent
            continue
        if request.status.name == "RUNNING":
            running += 1
        else:
            waiting += 1
        done = request.num_computed_tokens
        prompt_tokens += max(0, request.num_prompt_tokens - done)
        if encoded is None:
            continue
        for feature in request.mm_features:
            at = feature.mm_position
            if at.offset + at.length > done and not encoded(feature.identifier):
                item_tokens += at.length
    return Pending(waiting, running, prompt_tokens, item_tokens)


def step_work(step: Step, requests: Mapping[str, EngineRequest]) -> StepWork:
    """What a step that has just been scheduled does; the requests count its tokens as computed already."""
    prompt_tokens = item_tokens = decodes = item_pairs = context_tokens = kv_tokens = 0
    for name, count in step.num_scheduled_tokens.items():
        request = requests[name]
        computed = request.num_computed_tokens - count
        left = request.num_prompt_tokens - computed
        if left > 0:
            chunk = min(count, left)
            prompt_tokens += chunk
            context_tokens += chunk * computed + chunk * (chunk - 1) // 2
        else:
            decodes += 1
            kv_tokens += computed
    for name, indices in step.scheduled_encoder_inputs.items():
        features = requests[name].mm_features
        lengths = [features[index].mm_position.length for index in indices]
        item_tokens += sum(lengths)
        item_pairs += sum(length * length for length in lengths)
    return StepWork(prompt_tokens, item_tokens, decodes, item_pairs, context_tokens, kv_tokens)
