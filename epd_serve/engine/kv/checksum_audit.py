"""Stamps checksums of every transfer's KV, at P once it is computed and at D once it has arrived: `EPD_KV_CHECKSUMS=1`.

For who shows that what arrives is what was sent, on a device that nothing has run on yet. It reads all blocks once more
at both ends, in the model's thread: never for serving. Both ends have the same tensor-parallel size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import xxhash

from epd_serve.engine.kv.receiver import Expected
from epd_serve.engine.kv.regions import Layers, whole_blocks
from epd_serve.engine.kv.sender import ChunkJob
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey
from npu_ops.blocks import BlockRun
from npu_ops.memory import DeviceMemory

CHECKSUMS_ENV = "EPD_KV_CHECKSUMS"
SENT, RECEIVED = "kv_checksums_sent", "kv_checksums_received"


def layer_checksums(layers: Layers, blocks: Sequence[int], device: DeviceMemory) -> list[str]:
    """xxh3-128 (hex) of each layer's regions at these blocks, in their order: equal at both ends where KV is.

    Whole blocks, so both ends have the same tensor-parallel size. Sees all that the calling thread's stream has queued;
    the thread has entered the device, and another stream's writes were waited for. Takes memory for one region's share.

    Raises:
        BlocksError: a block that is none.
    """
    runs = [BlockRun(block, 1) for block in blocks]
    found = []
    for regions, pieces in zip(layers, whole_blocks(layers), strict=True):
        digest = xxhash.xxh3_128()
        for region, piece in zip(regions, pieces, strict=True):
            gathered = device.allocate(len(blocks) * region.block_bytes).data
            device.gather(gathered, [region.cut(piece)], runs)
            digest.update(device.to_host(gathered).numpy())
        found.append(digest.hexdigest())
    return found


def asked_for() -> bool:
    return os.environ.get(CHECKSUMS_ENV) == "1"


class ChecksumAudit:
    """Of one worker. Blocks are taken in the order of D's ids, which both ends know."""

    def __init__(self, layers: Layers, device: DeviceMemory, trace: Trace) -> None:
        self._layers, self._device, self._trace = layers, device, trace
        self._blocks: dict[str, dict[int, int]] = {}  # P's by D's, of requests that are being computed
        self._whole: list[ChunkJob] = []

    def computing(self, jobs: Iterable[ChunkJob], stops: Iterable[str]) -> None:
        """At P, before a step. `stops`: ids of requests whose transfers end early."""
        for request in stops:
            self._blocks.pop(request, None)
        for job in jobs:
            self._blocks.setdefault(job.request, {}).update(zip(job.dst, job.src, strict=True))
            if job.last:
                self._whole.append(job)

    def computed(self) -> None:
        """At P, after a step has queued all that it writes."""
        for job in self._whole:
            blocks = self._blocks.pop(job.request, {})
            self._stamp(job.key, SENT, [blocks[there] for there in sorted(blocks)])
        self._whole.clear()

    def received(self, items: Iterable[Expected]) -> None:
        """At D, before a step may write to the blocks."""
        for item in items:
            self._stamp(item.key, RECEIVED, sorted(item.blocks))

    def _stamp(self, key: TransferKey, event: str, blocks: list[int]) -> None:
        sums = layer_checksums(self._layers, blocks, self._device)
        self._trace.stamp(key.transfer_id, event, child=key.child, blocks=len(blocks), sums=sums)
