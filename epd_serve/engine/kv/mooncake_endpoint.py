"""Mooncake's Transfer Engine in one worker: one-sided writes between registered memory, KV caches or features.

`P2PHANDSHAKE`, no daemon. Protocol `tcp` here, `ascend` and `rdma` by configuration of the same calls. Completion goes
over our own data channel (DONE follows the last write), because Mooncake's notifies do not work on every protocol.
Which memory to register is worked out by `spans_of`, which is pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from epd_serve.engine.kv.transport import LinkError
from npu_ops.memory import MAX_REGIONS, DeviceBlock, DeviceMemory
from store.addresses import authority, environment_at
from store.errors import StoreError
from store.mooncake.client import ASCEND, begin_engine, process_engine, transfer_engine


class Extent(NamedTuple):
    """Addresses of one region, and of the storage that it lies in; ends are exclusive."""

    start: int
    end: int
    storage_start: int
    storage_end: int


class SpanError(ValueError):
    """The memory cannot be registered so; the message names the numbers."""


def extents_of(regions: Iterable[torch.Tensor]) -> list[Extent]:
    """Where these lie, each flat bytes."""
    extents = []
    for region in regions:
        start, storage = region.data_ptr(), region.untyped_storage()
        extents.append(Extent(start, start + region.numel(), storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
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


_OTHERS = 2
"""What a KV cache leaves of the regions that an engine may have: for scratch memory, and features on the device."""

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    # Slices that a peer may have waiting. With the default of 1024 each, one write of 200 MB fails, and so does every
    # write to that peer after it; after an idle gap a small one does (Mooncake #4209).
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}


class MooncakeEndpoint:
    """The Transfer Engine of one worker for one purpose, with its memory registered.

    Args:
        regions: flat bytes of `device`, which the calling thread has set; peers write to them as long as the engine
            lives.
        scratch: device memory that probes may read and write as long; None where nobody probes.
        engine_factory: makes the engine; by default Mooncake's, over Ascend that which features use, too.

    Attributes:
        session: what peers write to.
        bases: address of each region, in order.
        scratch: address and bytes of registered memory that probes may read and write at any time; (0, 0) for none.

    Raises:
        LinkError: Mooncake is not installed or cannot register the memory.
    """

    def __init__(
        self,
        regions: Sequence[torch.Tensor],
        host: str,
        protocol: str,
        device: DeviceMemory,
        scratch: DeviceBlock | None = None,
        engine_factory: Callable[[], Any] | None = None,
    ) -> None:
        for name, value in {**_ENVIRONMENT, **environment_at(host)}.items():
            os.environ.setdefault(name, value)
        # Ascend's transport demands what the device names as its alignment; other protocols take any address.
        alignment = device.alignment if protocol == ASCEND else 1
        try:
            spans = spans_of(extents_of(regions), alignment, MAX_REGIONS - _OTHERS)
        except SpanError as error:
            raise LinkError(f"kv transport mooncake: {error}") from error
        begin = process_engine if protocol == ASCEND and engine_factory is None else begin_engine
        try:
            self.engine: Any = begin(engine_factory or transfer_engine, host, protocol)
        except StoreError as error:
            raise LinkError(f"kv transport mooncake: {error}; or use --kv-transport shm on one host") from error
        self.session = authority(host, self.engine.get_rpc_port())
        self.bases = [region.data_ptr() for region in regions]
        self._kept = regions, scratch  # peers write to them
        self.scratch = (scratch.address, scratch.nbytes) if scratch is not None else (0, 0)
        for address, nbytes in [*spans, *([self.scratch] if scratch is not None else ())]:
            if self.engine.register_memory(address, nbytes) != 0:
                raise LinkError(f"Mooncake cannot register {nbytes} bytes at {address:#x}")
