"""Packet plan: which blocks of which layers go together (EPD-Serve §3.3, grouped packaging). Pure.

A prompt's KV leaves in chunks (what one prefill step computed) by layer groups (g adjacent layers). Only whole blocks
leave before the last chunk, and the partial last block goes with it, so every block of every layer is sent exactly
once per run of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_serve.wire import TransferKey


@dataclass(frozen=True)
class Run:
    """`count` adjacent blocks from `src` at P to `dst` at D."""

    src: int
    dst: int
    count: int


Part = tuple[TransferKey, tuple[Run, ...]]


@dataclass(frozen=True)
class LayerPacket:
    """Layers [first, last) of some block runs of one or several transfers."""

    first: int
    last: int
    parts: tuple[Part, ...]

    @property
    def blocks(self) -> int:
        return sum(run.count for _, runs in self.parts for run in runs)


def blocks_ready(end_token: int, prompt_tokens: int, block_size: int) -> int:
    """How many leading blocks may leave once tokens [0, end_token) are computed: whole ones, all at the end."""
    if end_token >= prompt_tokens:
        return -(-prompt_tokens // block_size)
    return end_token // block_size


def coalesce(src: Sequence[int], dst: Sequence[int]) -> tuple[Run, ...]:
    """Join block pairs that are adjacent on both ends. Sorted by source: free lists hand blocks out in reverse."""
    assert len(src) == len(dst)
    runs: list[Run] = []
    for s, d in sorted(zip(src, dst, strict=True)):
        last = runs[-1] if runs else None
        if last is not None and last.src + last.count == s and last.dst + last.count == d:
            runs[-1] = Run(last.src, last.dst, last.count + 1)
        else:
            runs.append(Run(s, d, 1))
    return tuple(runs)
