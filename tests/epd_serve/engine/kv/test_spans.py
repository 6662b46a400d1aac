"""Registered memory: every byte of the KV cache, nothing beside its allocations, aligned, in few spans."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.engine.kv.mooncake_endpoint import Extent, SpanError, extents_of, spans_of
from epd_serve.engine.kv.regions import flat_regions, layers_of

MB = 1 << 20


@st.composite
def allocations(draw: st.DrawFn) -> list[Extent]:
    """Storages one after the other, some of them touching, with regions anywhere inside."""
    at, extents = draw(st.integers(1, 300)), []
    for _ in range(draw(st.integers(1, 8))):
        size = draw(st.integers(1, 200))
        for _ in range(draw(st.integers(1, 4))):
            start = at + draw(st.integers(0, size - 1))
            extents.append(Extent(start, draw(st.integers(start + 1, at + size)), at, at + size))
        at += size + draw(st.sampled_from([0, 1, 50]))
    return draw(st.permutations(extents))


@given(allocations(), st.sampled_from([1, 2, 16]), st.integers(1, 9))
def test_spans_cover_the_cache_and_nothing_but_its_allocations(
    extents: list[Extent], alignment: int, limit: int
) -> None:
    try:
        spans = spans_of(extents, alignment, limit)
    except SpanError:
        storages = sorted({(x.storage_start, x.storage_end) for x in extents})
        apart = 1 + sum(former[1] < later[0] for former, later in itertools.pairwise(storages))
        firsts = {x.storage_start: min(y.start for y in extents if y.storage_start == x.storage_start) for x in extents}
        assert apart > limit or any(first - first % alignment < storage for storage, first in firsts.items())
        return
    registered = [byte for start, size in spans for byte in range(start, start + size)]
    assert len(spans) <= limit
    assert len(set(registered)) == len(registered)
    assert all(start % alignment == 0 for start, _ in spans)
    assert {byte for x in extents for byte in range(x.start, x.end)} <= set(registered)
    assert set(registered) <= {byte for x in extents for byte in range(x.storage_start, x.storage_end)}
    if alignment == 1 and limit >= 8:
        assert len(spans) == len({x.storage_start for x in extents})  # allocations stay apart where they may


def test_layers_that_are_views_of_one_storage_are_one_span() -> None:
    storage = torch.zeros(100, dtype=torch.uint8)
    layers = layers_of({str(i): storage[10 + 12 * i :][:12].view(3, 4) for i in range(5)}, 3)
    assert spans_of(extents_of(flat_regions(layers)), 1, 255) == [(storage.data_ptr() + 10, 60)]


def test_ascend_registers_from_the_aligned_cache_not_from_the_start_of_its_storage() -> None:
    """vllm-ascend allocates 2 MB more than it needs and gives the model the aligned slice."""
    layers = []
    for _ in range(3):
        raw = torch.zeros(4 * MB, dtype=torch.uint8)
        layers.append(raw[-raw.data_ptr() % (2 * MB) :][: 2 * MB].view(8, -1))
    wanted = sorted((layer.data_ptr(), 2 * MB) for layer in layers)
    extents = extents_of(flat_regions(layers_of({str(i): layer for i, layer in enumerate(layers)}, 8)))
    assert sorted(spans_of(extents, 2 * MB, 255)) == wanted
    with pytest.raises(SpanError, match="3 regions in 3 separate allocations, and at most 2 spans"):
        spans_of(extents, 2 * MB, 2)


def test_a_cache_that_cannot_be_aligned_is_refused_with_its_address() -> None:
    with pytest.raises(SpanError, match="begins at 0x1010, no multiple of 4096 bytes, and its allocation at 0x1008"):
        spans_of([Extent(0x1010, 0x2000, 0x1008, 0x3000)], 4096, 255)
