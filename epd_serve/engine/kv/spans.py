"""Which memory to register with a transport that moves it by address. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from epd_serve.engine.kv.regions import Layers


class Extent(NamedTuple):
    """Addresses of one region, and of the storage that it lies in; ends are exclusive."""

    start: int
    end: int
    storage_start: int
    storage_end: int


class SpanError(ValueError):
    """The memory cannot be registered so; the message names the numbers."""


def extents_of(layers: Layers) -> list[Extent]:
    """Where the regions lie."""
    extents = []
    for region in (region for layer in layers for region in layer):
        start, storage = region.data.data_ptr(), region.data.untyped_storage()
        extents.append(
            Extent(start, start + region.data.numel(), storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        )
    return extents


def spans_of(extents: Iterable[Extent], alignment: int, limit: int) -> list[tuple[int, int]]:
    """(address, bytes) of the spans to register: one per storage, from the first region in it to the end of the last.

    Layers are often views of one storage, which registers once. A span begins at a multiple of `alignment`: on Ascend
    vLLM aligns the regions and not their storages. Storages that touch share a span only where there would be more
    than `limit`: a transport may refuse memory of two allocations.

    Raises:
        SpanError: a region begins between multiples, with none before it in its storage; or too many spans are left.
    """
    extents = sorted(extents)
    spans = _joined(extents, touching=False)
    if len(spans) > limit:
        spans = _joined(spans, touching=True)
    if len(spans) > limit:
        raise SpanError(
            f"the KV cache has {len(extents)} regions in {len(spans)} separate allocations, and at most {limit} spans "
            "of memory can be registered"
        )
    return [_aligned(span, alignment) for span in spans]


def _joined(extents: Iterable[Extent], *, touching: bool) -> list[Extent]:
    """Extents whose storages are one, or overlap, or also touch, become one. `extents` in order of their start."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if last is None or extent.storage_start >= last.storage_end + touching:
            joined.append(extent)
            continue
        joined[-1] = Extent(
            last.start,
            max(last.end, extent.end),
            min(last.storage_start, extent.storage_start),
            max(last.storage_end, extent.storage_end),
        )
    return joined


def _aligned(span: Extent, alignment: int) -> tuple[int, int]:
    start = span.start - span.start % alignment
    if start < span.storage_start:
        raise SpanError(
            f"the KV cache begins at {span.start:#x}, no multiple of {alignment} bytes, and its allocation at "
            f"{span.storage_start:#x} holds none before it"
        )
    return start, span.end - start
