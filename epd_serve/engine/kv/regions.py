"""The KV cache as bytes: each layer is a list of regions, each region a row of equal blocks.

CPU and CUDA keep one tensor per layer with the block index first, some CUDA backends put K and V first, Ascend keeps K
and V (or more, for MLA) apart. Blocks move as opaque bytes; `KVShape` says what must agree for that to be right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Region:
    """Flat bytes of one region: `data` is uint8 of [num_blocks * block_bytes], a view of the KV cache."""

    data: torch.Tensor
    block_bytes: int

    def blocks(self, first: int, count: int) -> torch.Tensor:
        """Bytes of adjacent blocks, a view of [count * block_bytes]."""
        return self.data[first * self.block_bytes : (first + count) * self.block_bytes]


Layers = tuple[tuple[Region, ...], ...]


def layers_of(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], num_blocks: int) -> Layers:
    """View vLLM's KV caches (layer name → tensor or tensors) as regions, in layer order.

    Raises:
        ValueError: a tensor whose blocks are not each contiguous, or that has no dimension of `num_blocks`.
    """
    return tuple(
        tuple(
            region
            for tensor in ([cache] if isinstance(cache, torch.Tensor) else cache)
            for region in _regions(name, tensor, num_blocks)
        )
        for name, cache in kv_caches.items()
    )


def _regions(name: str, tensor: torch.Tensor, num_blocks: int) -> list[Region]:
    if tensor.shape[0] == num_blocks:
        return [_flat(name, tensor)]
    if tensor.dim() > 1 and tensor.shape[1] == num_blocks:
        return [_flat(name, part) for part in tensor]
    raise ValueError(f"KV cache of {name}: shape {tuple(tensor.shape)} has no dimension of {num_blocks} blocks")


def _flat(name: str, tensor: torch.Tensor) -> Region:
    size = tensor.element_size()
    block_bytes = tensor[0].numel() * size
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if span * size != block_bytes or tensor.stride(0) * size != block_bytes:
        raise ValueError(f"KV cache of {name}: blocks are not contiguous (stride {tensor.stride()})")
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.shape[0] * block_bytes,))
    return Region(flat, block_bytes)


def shape_of(layers: Layers, *, block_size: int, dtype: str, tp: int, rank: int, platform: str) -> dict[str, Any]:
    """What the handshake compares: the same on both ends means that bytes mean the same."""
    return {
        "layers": len(layers),
        "region_block_bytes": [[region.block_bytes for region in layer] for layer in layers],
        "block_size": block_size,
        "dtype": dtype,
        "tp": tp,
        "rank": rank,
        "platform": platform,
    }


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """One line naming what differs, or ""."""
    return "; ".join(
        f"{name}: {mine.get(name)!r} here, {theirs.get(name)!r} there"
        for name in sorted(set(mine) | set(theirs))
        if mine.get(name) != theirs.get(name)
    )
