"""KV caches as bytes, in the layouts of the platforms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd_serve import wire
from epd_serve.engine import compat
from epd_serve.engine.kv.regions import ShapesDifferError, differences, layers_of, pieces_of, shape_of
from epd_serve.kv.heads import piece_of


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
    mine = shape_of(layers, names=["a"], block_size=16, dtype="bf16", tp=1, rank=0, platform="cpu")
    assert differences(mine, dict(mine)) == ""
    assert differences(mine, {**mine, "dtype": "fp8"}) == "dtype: 'bf16' here, 'fp8' there"
    assert "layers: 1 here, None there" in differences(mine, {key: mine[key] for key in mine if key != "layers"})


def test_a_part_is_the_bytes_of_some_heads_of_adjacent_blocks() -> None:
    cache = torch.arange(6 * 3 * 4 * 2, dtype=torch.int16).reshape(6, 3, 4, 2)  # [blocks, block_size, heads, head_dim]
    ((region,),) = layers_of({"a": cache}, 6)
    part = region.part(2, 3, piece_of(region.block_bytes, 3, 4, range(1, 3)))
    assert part.shape == (3, 3, 2 * 2 * 2)
    assert torch.equal(part.contiguous().view(torch.int16).reshape(3, 3, 2, 2), cache[2:5, :, 1:3])
    part.zero_()
    assert not cache[2:5, :, 1:3].any()
    assert cache[2:5, :, 0].all() and cache[2:5, :, 3].all() and cache[5].all()


def test_a_part_of_a_region_that_begins_inside_a_storage() -> None:
    storage = torch.arange(5 * 2 * 6, dtype=torch.uint8)
    layers = layers_of({"a": storage[12:].view(4, 2, 6)}, 4)
    assert layers[0][0].part(1, 1, piece_of(12, 2, 3, range(2, 3))).tolist() == [[[28, 29], [34, 35]]]


EIGHT_HEADS = {
    "names": "a",
    "block_size": 16,
    "dtype": "bf16",
    "tp": 1,
    "rank": 0,
    "platform": "x",
    "kv_heads_total": 8,
}


@pytest.mark.parametrize(
    ("cache", "rows"),
    [
        (torch.zeros(6, 8, 16, 64), 1),  # CPU: K and V of a head together
        (torch.zeros(2, 6, 16, 8, 32), 16),  # CUDA, flash attention
        (torch.zeros(6, 16, 8, 64).permute(0, 2, 1, 3), 16),  # CUDA since 0.28: axes named heads first, memory is not
        (torch.zeros(6, 8, 16, 64).permute(0, 2, 1, 3), 1),  # and the reverse
        (torch.zeros(6, 2, 16, 8, 32), 32),  # FlashInfer before 0.28: K and V inside the block
        (torch.zeros(6, 2, 8, 16, 32), 2),
        (torch.zeros(6, 8, 16, 8), 1),  # head_dim equal to the heads
        (torch.zeros(6, 8 * 16 * 64), 0),  # one axis: nobody knows
        (torch.zeros(6, 4, 16, 64), 0),  # a layer with other heads than the model
        (torch.zeros(6, 8, 4, 16, 8), 0),  # packed by some kernels: tokens are not beside heads
    ],
)
def test_where_heads_lie_is_read_from_the_memory_of_the_cache(cache: torch.Tensor, rows: int) -> None:
    shape = shape_of(layers_of({"a": cache}, 6), **EIGHT_HEADS)
    assert set(shape["head_rows"][0]) == {rows}


@pytest.mark.parametrize(
    ("layout", "rows"), [("", 0), ("LBHNC", 1), ("LBNHC", 16), ("HND", 1), ("NHD", 16), ("odd", 0)]
)
def test_as_many_heads_as_tokens_need_the_name_of_the_layout(layout: str, rows: int) -> None:
    layers = layers_of({"a": torch.zeros(6, 16, 16, 64)}, 6)
    assert shape_of(layers, **{**EIGHT_HEADS, "kv_heads_total": 16}, layout=layout)["head_rows"] == [[rows]]


def test_the_name_of_the_layout_does_not_overrule_the_sizes() -> None:
    layers = layers_of({"a": torch.zeros(6, 8, 16, 64)}, 6)
    assert shape_of(layers, **EIGHT_HEADS, layout="NHD")["head_rows"] == [[1]]


@pytest.mark.parametrize("heads", [0, 1, 2])
def test_a_rank_with_one_head_or_none_needs_no_axis(heads: int) -> None:
    layers = layers_of({"a": (torch.zeros(6, 16, 512), torch.zeros(6, 16 * 64))}, 6)
    shape = shape_of(layers, **{**EIGHT_HEADS, "tp": 2, "kv_heads_total": heads})
    assert shape["head_rows"] == [[1, 1]]


def test_a_shape_crosses_the_wire_unchanged() -> None:
    shape = shape_of(layers_of({"a": torch.zeros(2, 6, 16, 8, 32)}, 6), **EIGHT_HEADS)
    sent = wire.to_prefill_worker.decode(wire.encode(wire.HelloAck("D0:1", shape=shape)))
    assert isinstance(sent, wire.HelloAck)
    assert differences(shape, sent.shape) == ""


@pytest.mark.parametrize("first", ["blocks", "keys and values"])
def test_a_block_of_the_scheduler_is_the_kernels_blocks_that_it_consists_of(first: str) -> None:
    whole = torch.arange(2 * 6 * 4 * 3 * 2, dtype=torch.int16).reshape(2, 6, 4, 3, 2)  # K and V, blocks, tokens, …
    split = whole.view(2, 12, 2, 3, 2)
    caches = ({"a": whole}, {"a": split}) if first != "blocks" else ({"a": whole[0]}, {"a": split[0]})
    mine, theirs = (layers_of(cache, 6)[0] for cache in caches)
    assert len(mine) == len(theirs) == (1 if first == "blocks" else 2)
    for one, other in zip(mine, theirs, strict=True):
        assert one.block_bytes == other.block_bytes
        assert [torch.equal(one.blocks(at, 1), other.blocks(at, 1)) for at in range(6)] == [True] * 6


@pytest.mark.parametrize(
    ("cache", "rows"),
    [(torch.zeros(24, 4, 8, 64), 16), (torch.zeros(24, 8, 4, 64), 4)],  # 16 tokens in blocks of 4: first, and last
    ids=["tokens, heads", "heads, tokens"],
)
def test_heads_lie_in_each_of_the_kernels_blocks(cache: torch.Tensor, rows: int) -> None:
    assert shape_of(layers_of({"a": cache}, 6), **EIGHT_HEADS)["head_rows"] == [[rows]]


def of(cache: torch.Tensor, name: str = "a") -> dict[str, Any]:
    return shape_of(layers_of({name: cache}, 6), **{**EIGHT_HEADS, "names": [name]})


@pytest.mark.parametrize(
    ("here", "there", "why"),
    [
        (of(torch.zeros(6, 16, 8, 64)), of(torch.zeros(6, 8, 16, 64)), "block_axes"),
        (of(torch.zeros(6, 8, 16, 64)), of(torch.zeros(24, 8, 4, 64)), "block_axes"),
        (of(torch.zeros(6, 8, 16, 64)), of(torch.zeros(6, 8, 16, 64), "draft"), r"layer_names\[0\]: 'a' here, 'draft'"),
    ],
    ids=["axes", "the kernel's blocks", "the layers themselves"],
)
def test_as_many_bytes_that_mean_something_else_are_refused(here: Any, there: Any, why: str) -> None:
    with pytest.raises(ShapesDifferError, match=why):
        pieces_of(here, there, sending=True)


@pytest.mark.parametrize(
    ("meant", "stored", "said"),
    [
        ("auto", torch.bfloat16, "torch.bfloat16"),
        ("bfloat16", torch.bfloat16, "torch.bfloat16"),
        ("fp8", torch.uint8, "torch.uint8 as fp8_e4m3"),
        ("fp8_e4m3", torch.uint8, "torch.uint8 as fp8_e4m3"),
        ("fp8_e5m2", torch.uint8, "torch.uint8 as fp8_e5m2"),
    ],
)
def test_one_byte_numbers_say_which_they_are(meant: str, stored: torch.dtype, said: str) -> None:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=meant))
    assert compat.kv_dtype(config, stored) == said
