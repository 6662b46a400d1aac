"""Checksums of KV blocks at both ends: equal for equal bytes, whichever blocks hold them, and only for those."""

from __future__ import annotations

import pytest
import torch

from epd_serve.engine.kv.checksum_audit import layer_checksums
from epd_serve.engine.kv.regions import layers_of
from npu_ops.blocks import BlocksError
from tests.epd_serve.engine.kv.fakes import HOST, caches
from tests.epd_serve.engine.kv.slow_devices import BLOCKS, ascend_caches
from tests.fake_npu.device import FakeDevice


def test_equal_bytes_in_other_blocks_have_equal_checksums() -> None:
    p, d = caches(3, 8, filled=True), caches(3, 8, filled=False)
    for here, there in zip(p.values(), d.values(), strict=True):
        there[[6, 1]] = here[[2, 5]]
    sums = layer_checksums(layers_of(p, 8), [2, 5], HOST)
    assert sums == layer_checksums(layers_of(d, 8), [6, 1], HOST)
    assert len(set(sums)) == 3, "one for each layer"


@pytest.mark.parametrize("blocks", [[5, 2], [2, 4], [2]])
def test_other_blocks_or_another_order_have_other_checksums(blocks: list[int]) -> None:
    layers = layers_of(caches(3, 8, filled=True), 8)
    pairs = zip(layer_checksums(layers, blocks, HOST), layer_checksums(layers, [2, 5], HOST), strict=True)
    assert all(one != other for one, other in pairs)


def test_one_byte_of_one_region_changes_its_layer_alone() -> None:
    device = FakeDevice()
    device.enter_thread()
    kv = ascend_caches(device)
    layers = layers_of(kv, BLOCKS)
    before = layer_checksums(layers, [3, 9], device)
    device.run(lambda: layers[2][1].blocks(9, 1)[-1:].fill_(1))  # queued: its stream gets there first
    after = layer_checksums(layers, [3, 9], device)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, False, True]
    assert not device.broken


def test_a_block_that_is_none_is_named() -> None:
    with pytest.raises(BlocksError, match="block 8 of a row of 8"):
        layer_checksums(layers_of({"a": torch.zeros(8, 4)}, 8), [8], HOST)
