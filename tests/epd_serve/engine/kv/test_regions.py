"""KV caches as bytes, in the layouts of the platforms."""

from __future__ import annotations

import pytest
import torch

from epd_serve.engine.kv.regions import differences, layers_of, shape_of


def test_block_first_is_one_region_whose_blocks_are_the_tensors() -> None:
    cache = torch.arange(6 * 2 * 4, dtype=torch.float32).reshape(6, 2, 4)
    ((region,),) = layers_of({"a": cache}, 6)
    assert region.block_bytes == 32
    assert torch.equal(region.blocks(2, 3).view(torch.float32), cache[2:5].reshape(-1))
    region.blocks(5, 1).zero_()
    assert not cache[5].any()


def test_keys_and_values_first_are_two_regions() -> None:
    cache = torch.arange(2 * 6 * 3, dtype=torch.int16).reshape(2, 6, 3)
    ((keys, values),) = layers_of({"a": cache}, 6)
    assert torch.equal(keys.blocks(1, 1).view(torch.int16), cache[0, 1])
    assert torch.equal(values.blocks(4, 2).view(torch.int16), cache[1, 4:6].reshape(-1))


def test_a_tuple_is_a_region_each_and_layers_keep_their_order() -> None:
    kv = (torch.zeros(6, 4), torch.ones(6, 2))
    layers = layers_of({"z": kv, "a": torch.zeros(6, 8)}, 6)
    assert [[region.block_bytes for region in layer] for layer in layers] == [[16, 8], [32]]


def test_layers_that_are_views_of_one_storage_are_told_apart() -> None:
    storage = torch.zeros(2 * 6 * 4, dtype=torch.uint8)
    layers = layers_of({"a": storage[:24].view(6, 4), "b": storage[24:].view(6, 4)}, 6)
    layers[1][0].blocks(0, 1).fill_(7)
    assert storage.tolist() == [0] * 24 + [7] * 4 + [0] * 20


def test_a_permuted_block_is_still_one_piece_of_bytes() -> None:
    cache = torch.zeros(6, 3, 4).permute(0, 2, 1)
    assert layers_of({"a": cache}, 6)[0][0].block_bytes == 48


@pytest.mark.parametrize("cache", [torch.zeros(6, 8)[:, :4], torch.zeros(4, 6).t(), torch.zeros(12, 4)[::2]])
def test_blocks_that_are_not_contiguous_are_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="layer-x: blocks are not contiguous"):
        layers_of({"layer-x": cache}, 6)


def test_a_cache_without_the_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no dimension of 6 blocks"):
        layers_of({"a": torch.zeros(5, 4)}, 6)


def test_differences_name_what_differs() -> None:
    layers = layers_of({"a": torch.zeros(6, 4)}, 6)
    mine = shape_of(layers, block_size=16, dtype="bf16", tp=1, rank=0, platform="cpu")
    assert differences(mine, dict(mine)) == ""
    assert differences(mine, {**mine, "dtype": "fp8"}) == "dtype: 'bf16' here, 'fp8' there"
    assert "layers: 1 here, None there" in differences(mine, {key: mine[key] for key in mine if key != "layers"})
