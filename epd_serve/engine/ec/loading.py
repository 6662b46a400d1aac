"""Into vLLM's encoder cache: a worker's copy of features that its scheduler side has pinned in the arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from epd_serve.engine.ec.step import FeatureSlot
from npu_ops.memory import DeviceMemory
from store.arena import Arena


class ArenaReader:
    """Reads from the arena, through the host. Whoever made the arena closes it, unless `owned`."""

    def __init__(self, arena: Arena, memory: DeviceMemory, *, owned: bool = False) -> None:
        self._arena, self._memory, self._owned = arena, memory, owned

    def read(self, slot: FeatureSlot) -> torch.Tensor:
        """A copy of a pinned feature, on the model's device. Called by the model's thread."""
        host = self._memory.host_buffer(slot.nbytes)
        self._arena.copy_pinned(slot.key, slot.slot, slot.offset, host.numpy())
        return self._memory.to_device(host).view(getattr(torch, slot.dtype)).view(slot.shape)

    def close(self) -> None:
        if self._owned:
            self._arena.close()


def load(reader: ArenaReader, slots: Iterable[FeatureSlot], cache: dict[str, torch.Tensor]) -> Iterator[FeatureSlot]:
    """Copies what the cache lacks; yields the slots it copied from."""
    for slot in slots:
        if slot.key not in cache:
            cache[slot.key] = reader.read(slot)
            yield slot
