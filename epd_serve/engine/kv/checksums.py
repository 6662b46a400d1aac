"""Checksums of KV blocks, for comparing what P has with what D got: layer by layer, whatever the block ids are."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from epd_serve.engine.kv.regions import Layers, whole_blocks
from npu_ops.blocks import BlockRun
from npu_ops.memory import DeviceMemory


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
