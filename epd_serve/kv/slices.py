"""Cuts a packet into slices: what is moved at once, between which a link may turn to something else. Pure.

A packet is what the policy decides on, and can be large: all layers of a long chunk. While it moves nothing more urgent
can leave, and a device needs memory to gather it. Slices bound both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from epd_serve.kv.plan import LayerPacket, Part, Run

SLICE_BYTES = 8 << 20  # below a millisecond on a fast link, and large beside what a slice costs to set up
LARGEST_PROBE_BYTES = 4 << 20


def cut(packet: LayerPacket, block_bytes: Sequence[int], max_bytes: int) -> list[LayerPacket]:
    """Slices of at most `max_bytes`, in order: adjacent layers; where one layer is too large, some of its blocks.

    `block_bytes`: per layer of the model, the bytes of one block. A single block that is too large is a slice.
    """
    blocks = packet.blocks
    slices: list[LayerPacket] = []
    first, size = packet.first, 0
    for layer in range(packet.first, packet.last):
        layer_bytes = blocks * block_bytes[layer]
        if layer > first and size + layer_bytes > max_bytes:
            slices.append(LayerPacket(first, layer, packet.parts))
            first, size = layer, 0
        if layer_bytes > max_bytes:
            at_once = max(1, max_bytes // block_bytes[layer])
            slices += (LayerPacket(layer, layer + 1, parts) for parts in _by_blocks(packet.parts, at_once))
            first = layer + 1
        else:
            size += layer_bytes
    if first < packet.last:
        slices.append(LayerPacket(first, packet.last, packet.parts))
    return slices


def packet_bytes(packet: LayerPacket, block_bytes: Sequence[int]) -> int:
    return packet.blocks * sum(block_bytes[packet.first : packet.last])


def _by_blocks(parts: Sequence[Part], at_once: int) -> Iterator[tuple[Part, ...]]:
    """The parts' runs, in order, in portions of at most `at_once` blocks."""
    portion: list[Part] = []
    room = at_once
    for key, runs in parts:
        taken: list[Run] = []
        for run in runs:
            while run.count:
                count = min(run.count, room)
                taken.append(Run(run.src, run.dst, count))
                run = Run(run.src + count, run.dst + count, run.count - count)
                room -= count
                if not room:
                    yield (*portion, (key, tuple(taken)))
                    portion, taken, room = [], [], at_once
        if taken:
            portion.append((key, tuple(taken)))
    if portion:
        yield tuple(portion)
