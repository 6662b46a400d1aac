"""Slices of a packet carry all of it once, in order, and are as small as asked."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.kv.plan import LayerPacket, Run
from epd_serve.kv.slices import cut, packet_bytes
from tests.epd_serve.engine.kv.fakes import key_of


def contents(*packets: LayerPacket) -> Counter[tuple[object, ...]]:
    """(layer, transfer, source block, destination block) with how often."""
    return Counter(
        (layer, key, run.src + i, run.dst + i)
        for packet in packets
        for layer in range(packet.first, packet.last)
        for key, runs in packet.parts
        for run in runs
        for i in range(run.count)
    )


runs = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(runs, min_size=1, max_size=3), st.integers(1, 400))
def test_slices_carry_each_block_of_each_layer_once_and_keep_to_the_limit(
    block_bytes: list[int], parts: list[list[int]], limit: int
) -> None:
    packet = LayerPacket(
        0,
        len(block_bytes),
        tuple(
            (key_of(str(i)), tuple(Run(100 * i + 10 * j, 50 * i + 7 * j, count) for j, count in enumerate(counts)))
            for i, counts in enumerate(parts)
        ),
    )
    slices = cut(packet, block_bytes, limit)
    assert contents(*slices) == contents(packet)
    assert all(
        packet_bytes(part, block_bytes) <= limit or (part.last - part.first, part.blocks) == (1, 1) for part in slices
    )
    assert [part.first for part in slices] == sorted(part.first for part in slices)


def test_a_packet_below_the_limit_is_one_slice() -> None:
    packet = LayerPacket(1, 3, ((key_of("a"), (Run(0, 4, 2),)),))
    assert cut(packet, [8, 8, 8], 32) == [packet]


def test_layers_stay_together_as_long_as_they_fit() -> None:
    packet = LayerPacket(0, 5, ((key_of("a"), (Run(0, 0, 2),)),))
    assert [(part.first, part.last) for part in cut(packet, [8] * 5, 33)] == [(0, 2), (2, 4), (4, 5)]
