"""Into vLLM's encoder cache: a worker's copy of features that its scheduler side has pinned, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from epd_serve.engine.ec.device_fetch import FeatureAgent
from epd_serve.engine.ec.device_trailer import FeatureShape
from epd_serve.engine.ec.step import FeatureSlot
from npu_ops.memory import DeviceMemory
from store.arena import Arena
from store.mooncake.tier import MooncakeStore


class FeatureReader(Protocol):
    """Reads what a slot names. Called by the model's thread."""

    def read(self, slot: FeatureSlot) -> torch.Tensor:
        """A copy of a pinned feature, on the model's device."""

    def close(self) -> None: ...


class ArenaReader:
    """Reads from the arena, through the host. Whoever made the arena closes it, unless `owned`."""

    def __init__(self, arena: Arena, memory: DeviceMemory, *, owned: bool = False) -> None:
        self._arena, self._memory, self._owned = arena, memory, owned

    def read(self, slot: FeatureSlot) -> torch.Tensor:
        host = self._memory.host_buffer(slot.nbytes)
        self._arena.copy_pinned(slot.key, slot.slot, slot.offset, host.numpy())
        return self._memory.to_device(host).view(getattr(torch, slot.dtype)).view(slot.shape)

    def close(self) -> None:
        if self._owned:
            self._arena.close()


class SlabReader:
    """Reads from this worker's slab what lies there, anything else from the arena. Owns all three."""

    def __init__(self, agent: FeatureAgent, tier: MooncakeStore, arena: ArenaReader) -> None:
        self._agent, self._tier, self._arena = agent, tier, arena

    def read(self, slot: FeatureSlot) -> torch.Tensor:
        if not slot.on_device:
            return self._arena.read(slot)
        return self._agent.load(slot.offset, slot.nbytes, FeatureShape(slot.shape, slot.dtype))

    def close(self) -> None:
        self._agent.close()
        self._tier.close()
        self._arena.close()


def load(reader: FeatureReader, slots: Iterable[FeatureSlot], cache: dict[str, torch.Tensor]) -> Iterator[FeatureSlot]:
    """Copies what the cache lacks; yields the slots it copied from."""
    for slot in slots:
        if slot.key not in cache:
            cache[slot.key] = reader.read(slot)
            yield slot
