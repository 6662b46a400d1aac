"""The operators of `operators.py` as calls on a device: torch's own, so that the vendor's kernels run.

The same code on cpu, cuda and npu. On an accelerator it has never run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from bench.micro.interference.operators import Sizes
from bench.micro.interference.ring import Ring

Call = Callable[[], object]
"""Queues the operator once on the device."""


def call_of(name: str, sizes: Sizes, device: torch.device, ring: Ring | None = None) -> Call:
    """The operator `name` with its tensors on `device`, which the calling thread has set.

    Args:
        ring: joins the ranks of an all-reduce; only that needs one.
    """
    s = sizes
    if name == "encoder_matmul":
        left, right = (
            _random(device, s.encoder_tokens, s.encoder_width),
            _random(device, s.encoder_width, s.encoder_inner),
        )
        return _matmul(left, right)
    if name == "prefill_matmul":
        return _matmul(_random(device, s.prompt_tokens, s.width), _random(device, s.width, s.inner))
    if name == "prefill_attention":
        query, key, value = (_random(device, 1, s.heads, s.prompt_tokens, s.head_dim) for _ in range(3))
        return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    if name == "decode_matmul":
        rows, weights = _random(device, s.batch, s.width), _random(device, s.decode_layers, s.width, s.inner)
        out = torch.empty(s.batch, s.inner, dtype=rows.dtype, device=device)
        layers = weights.unbind()

        def step() -> None:
            for weight in layers:
                torch.mm(rows, weight, out=out)

        return step
    if name == "decode_attention":
        # Grouped queries: those that share a KV head are rows of one small matrix, and there is no causal mask.
        query = _random(device, s.batch, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        key, value = (_random(device, s.batch, s.kv_heads, s.context, s.head_dim) for _ in range(2))
        return lambda: functional.scaled_dot_product_attention(query, key, value)
    if name == "norm":
        rows, weight = _random(device, s.prompt_tokens, s.width), _random(device, s.width)
        return lambda: functional.layer_norm(rows, (s.width,), weight)
    if name == "elementwise":
        gate, up = (_random(device, s.prompt_tokens, s.inner) for _ in range(2))
        return lambda: functional.silu(gate).mul_(up)
    if name in ("memory_copy", "copy_to_device", "copy_to_host"):
        return _copy(name, s.copy_bytes, device)
    if name == "all_reduce":
        assert ring is not None, "an all-reduce needs its peer"
        return ring.call(s.reduce_bytes)
    raise ValueError(f"no operator {name!r}")


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> Call:
    out = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)
    return lambda: torch.mm(left, right, out=out)


def _copy(name: str, nbytes: int, device: torch.device) -> Call:
    here = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if name == "memory_copy":
        other = torch.ones(nbytes, dtype=torch.uint8)
        return lambda: other.copy_(here)
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)  # as what the stages send from and receive into
    target, source = (here, host) if name == "copy_to_device" else (host, here)
    return lambda: target.copy_(source, non_blocking=True)
