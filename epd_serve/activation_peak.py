"""The most memory that activations take at once, in an encoder and in a language model, with the derivations. Pure.

All attention kernels that stages run are of the flash kind, which hold no scores: activations are linear in patches
and tokens. Weights, KV cache and what the device's runtime takes are others'.
"""

from __future__ import annotations

from epd_serve.model_sizes import LanguageSizes, TowerSizes

ALLOCATOR_SLACK = 1.1
"""Peaks are of live bytes; caching allocators round blocks up and cannot always join the free ones."""

_SAMPLER_BYTES = (
    24  # per sequence and word of the vocabulary: logits, a float32 copy, sorted values and indices (int64)
)


def tower_peak(sizes: TowerSizes, patches: int, *, tp: int, element_bytes: int, tokens: int | None = None) -> int:
    """Bytes of an encoder's forward pass over so many patches, its input and its features included.

    Per patch, in values of the width w and the MLP's intermediate i, from vLLM's Qwen2.5-VL and Qwen3-VL blocks
    (`x = x + attn(norm1(x))`, then `x = x + mlp(norm2(x))`; every name keeps its tensor until it is bound anew):

    - throughout: x (w), the norm's output as the caller's argument (w), pixels as they came, DeepStack's features.
    - attention: qkv (3 w), q and k made contiguous (2 w), their rotation and its products by halves (5 w), the context
      and its copy (2 w), the output (w): 13 w. A fused rotary kernel, as NPUs and GPUs have, needs less.
    - MLP: its input side (i, or 2 i gated) and the activation's result (i), then the output (w).

    So 2 w + max(13 w, (2 or 3) i + w), of which a rank of `tp` has its part of what is split by heads and columns.
    Measured on CPU, as the bytes that PyTorch's profiler saw allocated (the input was there before), divided by
    patches, w and two bytes: vLLM 0.32's own towers 13.2 and 12.5 (the demo model's, 256 and 4096 patches), 13.8
    (Qwen3-VL-8B's sizes), 14.8 (Qwen2.5-VL-7B's); the same without vLLM in Transformers 5.19, which rotates in float32:
    21.3, 21.3, 21.1, 17.3. Linear in the patches, as derived. Nothing was measured on an NPU or a GPU.

    Args:
        tokens: that come out, by default patches / merge.
    """
    tokens = -(-patches // sizes.merge) if tokens is None else tokens
    gated = 3 if sizes.gated else 2
    split = max(13 * sizes.width, gated * sizes.intermediate + sizes.width) / tp
    per_patch = 2 * sizes.width + split + sizes.patch_values
    return int(ALLOCATOR_SLACK * element_bytes * (patches * per_patch + tokens * sizes.feature_width))


def language_peak(sizes: LanguageSizes, tokens: int, sequences: int, *, tp: int, element_bytes: int) -> int:
    """Bytes of a language model's forward pass over so many tokens, and of sampling for so many sequences.

    Per token: hidden state, residual and the norm's output (3 h), then the larger of attention (q, k, v as they leave
    the projection and again with positions, and the context) and the MLP (gate and up side by side and their product,
    3 i; experts run the same for each expert of a token). Sampling makes logits for the last token of each sequence,
    whole on every rank, and sorts them for top-k and top-p.
    """
    heads = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    attention = 2 * heads + sizes.heads * sizes.head_dim
    per_token = 3 * sizes.hidden + max(attention, 3 * sizes.intermediate) / tp
    sampling = sequences * sizes.vocabulary * _SAMPLER_BYTES
    return int(ALLOCATOR_SLACK * (element_bytes * tokens * per_token + sampling))


def feature_cache(sizes: TowerSizes, tokens: int, *, element_bytes: int) -> int:
    """Bytes of vLLM's encoder cache: features that a request still needs, whole on every rank."""
    return tokens * sizes.feature_width * element_bytes


def feature_slab(cache_bytes: int) -> int:
    """Bytes of the slab that a worker which prefills takes where nobody says: as much as vLLM's encoder cache, for what
    steps read, and as much again for what comes next."""
    return 2 * cache_bytes
