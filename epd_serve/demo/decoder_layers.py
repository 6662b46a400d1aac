"""Decoder layers without a model: what measurements compute on a device while the KV that it writes travels.

The matmuls, the attention and the paged KV cache are those of a decoder layer of the given shape; weights are random,
and one set of them serves all layers (larger than any cache of a device, so each layer reads it anew). No norms, no
rotary embedding, no sampling: they take next to nothing of a prefill's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of one layer, and how many there are."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


EIGHT_B = DecoderShape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128)
"""Of the 8B models of today (Qwen3-8B has 36 layers and an ffn of 12288)."""


def cuda_missing() -> str:
    """Why nothing can be computed on CUDA here, or ""."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def device_name(kind: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if kind == "cuda" else "CPU"


def kv_caches(
    shape: DecoderShape, blocks: int, block_size: int, kind: str, *, pinned: bool = False
) -> dict[str, torch.Tensor]:
    """A paged KV cache: per layer [2, blocks, block_size, kv_heads, head_dim] of zeros in bfloat16, K before V.

    `pinned`: in host memory that the device `kind` reaches by itself.
    """
    size = (2, blocks, block_size, shape.kv_heads, shape.head_dim)
    where = "cpu" if pinned else kind
    return {
        f"layer.{number}": torch.zeros(size, dtype=torch.bfloat16, device=where, pin_memory=pinned and kind != "cpu")
        for number in range(shape.layers)
    }


class DecoderLayers:
    """Computes prompts on the calling thread's current stream.

    Args:
        caches: of `kv_caches`, which the layers write.
    """

    def __init__(self, shape: DecoderShape, caches: dict[str, torch.Tensor], kind: str) -> None:
        self._shape = shape
        self._caches = tuple(caches.values())
        self._kind = kind
        attended = shape.heads * shape.head_dim
        self._qkv = self._weight(attended + 2 * shape.kv_heads * shape.head_dim, shape.hidden)
        self._out = self._weight(shape.hidden, attended)
        self._up = self._weight(2 * shape.ffn, shape.hidden)
        self._down = self._weight(shape.hidden, shape.ffn)

    @torch.inference_mode()
    def prefill(self, tokens: int, blocks: range, on_layer: Callable[[], None]) -> None:
        """Queue a prompt of random embeddings; its KV goes to `blocks`.

        `on_layer` is called after the attention of each layer was queued, as vLLM calls a connector.
        """
        states = torch.randn(tokens, self._shape.hidden, dtype=torch.bfloat16, device=self._kind)
        for cache in self._caches:
            states = states + functional.linear(self._attend(states, cache, blocks), self._out)
            on_layer()
            gate, up = functional.linear(states, self._up).chunk(2, dim=-1)
            states = states + functional.linear(functional.silu(gate) * up, self._down)
            states = states / states.norm(dim=-1, keepdim=True)  # instead of norms: keeps numbers in range

    def _attend(self, states: torch.Tensor, cache: torch.Tensor, blocks: range) -> torch.Tensor:
        """[tokens, hidden] → [tokens, heads * head_dim]; writes K and V."""
        shape, tokens = self._shape, len(states)
        sizes = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
        query, key, value = (
            part.view(tokens, -1, shape.head_dim) for part in functional.linear(states, self._qkv).split(sizes, dim=-1)
        )
        slots = cache[:, blocks.start : blocks.stop].flatten(1, 2)  # [2, slots, kv_heads, head_dim], a view
        slots[0, :tokens].copy_(key)
        slots[1, :tokens].copy_(value)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.squeeze(0).transpose(0, 1).reshape(tokens, -1)

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._kind)
        return weight.normal_(std=columns**-0.5)
