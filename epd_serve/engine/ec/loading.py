"""From the arena into vLLM's encoder cache: a worker's copy of features that its scheduler side has pinned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from epd_serve.engine.ec.step import FeatureSlot
from store.arena import Arena


def load(
    arena: Arena, slots: Iterable[FeatureSlot], cache: dict[str, torch.Tensor], device: torch.device | str
) -> Iterator[str]:
    """Copies what the cache lacks; yields the keys it copied."""
    for slot in slots:
        if slot.key not in cache:
            raw = torch.from_numpy(np.frombuffer(arena.view(slot.offset, slot.nbytes), np.uint8).copy())
            cache[slot.key] = raw.view(getattr(torch, slot.dtype)).view(slot.shape).to(device)
            yield slot.key
