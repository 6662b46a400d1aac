"""Operators of the three stages whose interference is measured: names, shapes, and what each computes and moves. Pure.

After EPD-Serve's Fig. 6: which operators share a device well. Running them is `run.py`'s business,
what was found `deploy/planner/interference.py`'s. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def element_bytes(kind: str) -> int:
    """Of bfloat16, in which the stages compute; of float32 on a CPU, for without its own instructions for bfloat16 a
    product takes hundreds of times as long there, and many have none (`epd-serve doctor`)."""
    return 4 if kind == "cpu" else 2


@dataclass(frozen=True)
class Sizes:
    """Shapes of the operators. Widths are in elements.

    Attributes:
        encoder_tokens, encoder_width, encoder_inner: an MLP of the vision tower.
        prompt_tokens, width, inner: an MLP of the language model in prefill.
        heads, kv_heads, head_dim: its attention.
        batch, context: sequences that decode together, and how long each is.
        decode_layers: weight matrices that a decode step goes through, enough that no cache holds them.
        copy_bytes: of a copy between host and device. reduce_bytes: of an all-reduce.
    """

    encoder_tokens: int
    encoder_width: int
    encoder_inner: int
    prompt_tokens: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    decode_layers: int
    copy_bytes: int
    reduce_bytes: int


EIGHT_B = Sizes(4096, 1152, 4304, 2048, 4096, 12288, 32, 8, 128, 32, 4096, 4, 64 << 20, 16 << 20)
"""Qwen3-VL-8B's. Decode's weights and KV exceed the 192 MB of L2 of an Ascend 910B."""

BENCH = Sizes(1600, 256, 1024, 1024, 512, 2048, 8, 4, 64, 16, 4096, 32, 32 << 20, 4 << 20)
"""The `bench` preset's, for CPUs: a picture of 640², decode's weights and KV beyond an L3 of 32 MB."""


def default_sizes(kind: str) -> Sizes:
    return BENCH if kind == "cpu" else EIGHT_B


@dataclass(frozen=True)
class Operator:
    """What is run, and what one call of it has to do.

    Attributes:
        stages: roles whose time it is typical of.
        flops: floating-point operations. moved_bytes: read from and written to memory where no cache helps.
        link: what it moves goes over a bus or a network, or waits for a peer.
    """

    name: str
    stages: str
    flops: float
    moved_bytes: float
    link: bool = False

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.flops / self.moved_bytes


def operators(kind: str, devices: int, sizes: Sizes) -> dict[str, Operator]:
    """By name, in the order in which they are shown.

    Args:
        kind: `cpu`, `cuda` or `npu`. A CPU has no bus to itself: its copies are one, from memory to memory.
        devices: how many there are. An all-reduce takes two; on CPU both ranks share the cores, as two virtual
            devices on the same cores do.
    """
    s, size = sizes, element_bytes(kind)

    def matmul(rows: int, inner: int, columns: int, times: int = 1) -> tuple[float, float]:
        moved = (rows * inner + inner * columns + rows * columns) * size
        return 2.0 * times * rows * inner * columns, float(times * moved)

    prompt, wide = s.prompt_tokens * s.heads * s.head_dim, s.prompt_tokens * s.inner
    known = 2 * s.batch * s.context * s.kv_heads * s.head_dim  # elements of K and V
    whole = s.prompt_tokens * s.width
    every = [
        Operator("encoder_matmul", "E", *matmul(s.encoder_tokens, s.encoder_width, s.encoder_inner)),
        Operator("prefill_matmul", "P", *matmul(s.prompt_tokens, s.width, s.inner)),
        Operator("prefill_attention", "P", 2.0 * prompt * s.prompt_tokens, 4.0 * prompt * size),  # causal: half of it
        Operator("decode_matmul", "D", *matmul(s.batch, s.width, s.inner, s.decode_layers)),
        Operator("decode_attention", "D", 4.0 * s.batch * s.context * s.heads * s.head_dim, float(known * size)),
        Operator("norm", "EPD", 8.0 * whole, 2.0 * whole * size),
        Operator("elementwise", "EPD", 5.0 * wide, 3.0 * wide * size),
    ]
    if kind == "cpu":
        every.append(Operator("memory_copy", "EPD", 0.0, 2.0 * s.copy_bytes))
    else:
        every += [
            Operator("copy_to_device", "PD", 0.0, float(s.copy_bytes), link=True),
            Operator("copy_to_host", "EP", 0.0, float(s.copy_bytes), link=True),
        ]
    if kind == "cpu" or devices >= 2:
        every.append(Operator("all_reduce", "PD", s.reduce_bytes / size, 2.0 * s.reduce_bytes, link=True))
    return {one.name: one for one in every}


def needs(every: Mapping[str, Operator], alone_s: Mapping[str, float]) -> dict[str, str]:
    """The resource that each operator runs into first: `compute`, `memory` or `link`.

    A roofline whose roofs are the best that any of these operators reached alone on this device: what comes nearer to
    the operations per second than to the bytes per second is bound by compute.
    """
    resources = {}
    for name, (computes, moves) in shares_of_best(every, alone_s).items():
        resources[name] = "link" if every[name].link else "compute" if computes >= moves else "memory"
    return resources


def shares_of_best(every: Mapping[str, Operator], alone_s: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """(operations per second, bytes per second) of each, as shares of the best of any that uses no link."""
    flops = {name: every[name].flops / seconds for name, seconds in alone_s.items()}
    moved = {name: every[name].moved_bytes / seconds for name, seconds in alone_s.items()}
    local = [name for name in alone_s if not every[name].link] or list(alone_s)
    best_flops, best_moved = max(flops[name] for name in local), max(moved[name] for name in local)
    return {name: (flops[name] / (best_flops or 1.0), moved[name] / (best_moved or 1.0)) for name in alone_s}
