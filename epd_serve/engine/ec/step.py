"""What passes between vLLM and the two sides of our EC connector, as values: what a request says of itself (its items,
xargs of ours, the proxy's name for it), and what the scheduler side tells the worker side of a step."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from epd_serve.engine.ec.features import Pin
from epd_serve.wire import ALL_MISSING, ENCODE_AGAIN_XARG, MISSING_XARG, ON_MISSING_FAIL, ON_MISSING_XARG, PARTS_XARG
from npu_ops.memory import DeviceMemory
from store.arena import Arena
from store.feature import FeatureMeta
from store.keys import parts_by_whole

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

_MAX_REMEMBERED = 8192
# `0_chatcmpl-<X-Request-Id>-1a2b3c4d`: the child of an n > 1, the endpoint, the proxy's id, vLLM's random suffix.
# `resp_<id>_0-1a2b3c4d`: the same of a response, whose turns vLLM counts behind the id.
_OURS = re.compile(r"(?:\d+_)?(?:chatcmpl-|cmpl-)?(.+?)(?:-[0-9a-f]{8})?")
_RESPONSE = re.compile(r"resp_(.+?)_\d+(?:-[0-9a-f]{8})?")


def proxy_request_id(request_id: str) -> str:
    """The proxy's id of a request, as far as vLLM's can tell: what it sent begins with it, or is it."""
    matched = _RESPONSE.fullmatch(request_id) or _OURS.fullmatch(request_id)
    return matched.group(1) if matched else request_id


def items_ahead(request: Request, num_computed_tokens: int) -> list[MultiModalFeatureSpec]:
    """The items that the prefill has not passed, each occurrence, in the order of the prompt."""
    return [
        feature
        for feature in request.mm_features
        if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
    ]


def item_keys(request: Request) -> list[str]:
    """Keys of all its items, each occurrence, in the order of the prompt."""
    return [feature.identifier for feature in request.mm_features]


def item_parts(request: Request) -> dict[str, list[str]]:
    """Keys of the parts of those items that come in parts, by the proxy's word."""
    return parts_by_whole(_keys(request, PARTS_XARG))


def feature_keys(request: Request) -> list[str]:
    """Keys of the features that its items are made of."""
    parts = item_parts(request)
    return [key for item in item_keys(request) for key in parts.get(item, (item,))]


def not_encoded(request: Request) -> list[str]:
    """Keys that no encoder produced, by the proxy's word."""
    keys = _keys(request, MISSING_XARG)
    return item_keys(request) if keys == [ALL_MISSING] else keys


def to_encode_again(request: Request) -> list[str]:
    """Keys that a consumer could not get, by the proxy's word."""
    return _keys(request, ENCODE_AGAIN_XARG)


def must_not_recompute(request: Request) -> bool:
    """Whether a lost feature fails the request."""
    return _xarg(request, ON_MISSING_XARG) == ON_MISSING_FAIL


def _keys(request: Request, name: str) -> list[str]:
    return [key for key in _xarg(request, name).split(",") if key]


def _xarg(request: Request, name: str) -> str:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    value = extra.get(name, "")
    return value if isinstance(value, str) else ""


def remember(metadata: OrderedDict[str, dict[str, Any]], key: str, known: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of an item: what is `known` of it now, or was when vLLM's processor cache still had it."""
    known = known or metadata.get(key, {})
    if known:
        metadata[key] = known
        metadata.move_to_end(key)
        if len(metadata) > _MAX_REMEMBERED:
            metadata.popitem(last=False)
    return known


@dataclass(frozen=True)
class FeatureSlot:
    """Where the bytes of a feature lie, which the scheduler side has pinned: in the arena, in the slab, or in both.

    Attributes:
        slab_at: where they lie in the slab of every rank; None where they do not.
    """

    meta: FeatureMeta
    slot: int
    offset: int
    slab_at: int | None = None

    def read(self, arena: Arena, memory: DeviceMemory) -> torch.Tensor:
        """Returns a copy on the model's device, whose `memory` this is, through the host. On the model's thread."""
        host = memory.host_buffer(self.meta.nbytes)
        arena.copy_pinned(self.meta.key, self.slot, self.offset, host.numpy())
        return self.shaped(memory.to_device(host))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Its bytes as what they are, uncopied."""
        return flat.view(getattr(torch, self.meta.dtype)).view(self.meta.shape)


@dataclass(frozen=True)
class FeatureLoad:
    """An item to be loaded, from its feature or from those of its parts, whose rows follow one another."""

    key: str
    slots: tuple[FeatureSlot, ...]

    @classmethod
    def of(cls, key: str, leases: Sequence[Pin], slab_at: Sequence[int | None]) -> FeatureLoad:
        """`slab_at`: where each of them lies in the slab; None where it does not."""
        slots = (FeatureSlot(one.meta, one.slot, one.offset, at) for one, at in zip(leases, slab_at, strict=True))
        return cls(key, tuple(slots))

    @property
    def is_in_slab(self) -> bool:
        return all(slot.slab_at is not None for slot in self.slots)

    def read(
        self, arena: Arena, memory: DeviceMemory, view: Callable[[FeatureSlot], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Returns it on the model's device, whose `memory` this is. On the model's thread.

        Args:
            view: of what lies in the slab; None where there is none. The rest is copied from the arena.
        """
        parts = [
            view(slot) if view is not None and slot.slab_at is not None else slot.read(arena, memory)
            for slot in self.slots
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class NeededItem:
    """An item of a request that reached an encoder. `again`: its consumer could not get what was announced."""

    key: str
    metadata: dict[str, Any] = field(default_factory=dict)
    again: bool = False


@dataclass
class FeatureStep:
    """One step.

    Attributes:
        loads: items that this step's requests load instead of encoding them.
        freed_in: the number of this step where vLLM frees features in it that lie in the slab, else 0.
        needed: (encoder) items of requests that are seen for the first time.
        held: (encoder) keys of all requests that are queued or running.
        ended: (encoder) keys of requests that ended, served.
    """

    loads: list[FeatureLoad] = field(default_factory=list)
    freed_in: int = 0
    needed: list[NeededItem] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
