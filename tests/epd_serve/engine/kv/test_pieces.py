"""KV between ranks of different tensor-parallel sizes: real tensors, every layout, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epd_serve.engine.kv.regions import Layers, LinkPieces, ShapesDifferError, layers_of, pieces_of, shape_of
from epd_serve.kv.heads import heads_of, link_of

BLOCKS, BLOCK_SIZE, DIM = 5, 6, 3
LAYOUTS = {
    "heads first": lambda kv: [kv],
    "tokens first": lambda kv: [kv.transpose(1, 2).contiguous()],
    "tokens first, seen heads first": lambda kv: [kv.transpose(1, 2).contiguous().transpose(1, 2)],
    "K and V apart": lambda kv: list(kv.transpose(1, 2).contiguous().split(DIM, dim=-1)),
    "K and V outermost": lambda kv: [torch.stack(kv.transpose(1, 2).split(DIM, dim=-1))],
    "K and V inside": lambda kv: [torch.stack(kv.split(DIM, dim=-1), dim=1)],
}


def rank_layers(model: torch.Tensor, layout: str, tp: int, rank: int, heads: int) -> tuple[Layers, dict[str, Any]]:
    """The cache of one rank: its heads of `model` [blocks, heads, block_size, 2 * dim], in this layout."""
    held = heads_of(tp, rank, heads)
    tensors = [
        part.contiguous() if not part.is_contiguous() and layout == "K and V apart" else part
        for part in LAYOUTS[layout](model[:, held.start : held.stop].clone())
    ]
    layers = layers_of({"0": tensors, "1": [tensor.clone() for tensor in tensors]}, BLOCKS)
    agreed = {"names": "01", "block_size": BLOCK_SIZE, "dtype": "float32", "platform": "test"}
    shape = shape_of(layers, **agreed, tp=tp, rank=rank, kv_heads_total=heads)
    return layers, shape


def carry(src: Layers, dst: Layers, sending: LinkPieces | None, receiving: LinkPieces | None) -> None:
    """Moves every block as a transport does: P's piece of it, byte for byte, into D's piece."""
    for index, (from_layer, to_layer) in enumerate(zip(src, dst, strict=True)):
        for at, (here, there) in enumerate(zip(from_layer, to_layer, strict=True)):
            if sending is None or receiving is None:
                there.data.copy_(here.data)
                continue
            part = here.part(0, BLOCKS, sending.mine[index][at]).contiguous()
            target = there.part(0, BLOCKS, receiving.mine[index][at])
            target.copy_(part.view(target.shape))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 8), (8, 1), (1, 8), (8, 8)])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_every_rank_of_decode_ends_with_its_heads(layout: str, src_tp: int, dst_tp: int, heads: int) -> None:
    model = torch.randn(BLOCKS, heads, BLOCK_SIZE, 2 * DIM)
    sources = [rank_layers(model, layout, src_tp, rank, heads) for rank in range(src_tp)]
    for dst_rank in range(dst_tp):
        wanted, _ = rank_layers(model, layout, dst_tp, dst_rank, heads)
        layers, shape = rank_layers(torch.zeros_like(model), layout, dst_tp, dst_rank, heads)
        for src_rank, (theirs, their_shape) in enumerate(sources):
            if link_of(src_tp, src_rank, dst_tp, dst_rank, heads) is None:
                continue
            sending = pieces_of(their_shape, shape, sending=True)
            receiving = pieces_of(shape, their_shape, sending=False)
            assert (sending is None) == (receiving is None) == (src_tp == dst_tp)
            if sending is not None and receiving is not None:
                assert (sending.mine, sending.theirs) == (receiving.theirs, receiving.mine)
            carry(theirs, layers, sending, receiving)
        for got, want in zip(layers, wanted, strict=True):
            for here, there in zip(got, want, strict=True):
                assert torch.equal(here.data, there.data)


def shapes(
    src_tp: int = 2, dst_tp: int = 1, *, heads: int = 4, **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of P's rank 0 and D's rank 0 with `changes` to P's."""
    model = torch.zeros(BLOCKS, max(1, heads), BLOCK_SIZE, 2 * DIM)
    both = [
        shape_of(
            layers_of({"0": model[:, : len(heads_of(tp, 0, heads))].clone()}, BLOCKS),
            names="0",
            block_size=BLOCK_SIZE,
            dtype="float32",
            tp=tp,
            rank=0,
            platform="test",
            kv_heads_total=heads,
        )
        for tp in (src_tp, dst_tp)
    ]
    return {**both[0], **changes}, both[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype: 'float32' here, 'bfloat16' there"),
        ({"block_size": 16}, "block_size"),
        ({"platform": "npu"}, "platform"),
        ({"layers": 3}, "layers"),
        ({"kv_heads_total": 8}, "kv_heads_total: 4 here, 8 there"),
        ({"kv_heads_total": None}, "kv_heads_total"),
        ({"region_block_bytes": [[7]]}, "tp: 1 here, 2 there; .*rows of"),
        ({"region_block_bytes": [[576]]}, "bytes of a block: .*288.* here, .*576"),
        ({"region_block_bytes": [[288], [288]]}, "tp: 1 here, 2 there"),
        ({"head_rows": [[4]]}, "head_rows: .*4"),
        ({"rank": 2}, "rank 2 of tensor parallel size 2"),
        ({"rank": "0"}, "tp: 1 here, 2 there"),
        ({"tp": 3}, "4 KV heads cannot be shared out to tensor parallel size 3"),
        ({"tp": "two"}, "tp: 1 here, 'two' there"),
        ({"tp": None}, "tp: 1 here, None there"),
        ({"head_rows": None}, "tp: 1 here, 2 there"),
    ],
)
def test_shapes_that_do_not_match_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    theirs, mine = shapes(**changes)
    with pytest.raises(ShapesDifferError, match=said):
        pieces_of(mine, theirs, sending=False)


def test_heads_in_an_unknown_place_cannot_be_cut_but_equal_sizes_need_no_cut() -> None:
    theirs, mine = shapes()
    with pytest.raises(ShapesDifferError, match="where heads lie in a block"):
        pieces_of({**mine, "head_rows": [[0]]}, theirs, sending=False)
    assert pieces_of({**mine, "head_rows": [[0]]}, {**mine, "head_rows": [[0]]}, sending=False) is None


def test_an_unknown_number_of_heads_cannot_be_cut_but_equal_sizes_need_no_cut() -> None:
    theirs, mine = ({**shape, "kv_heads_total": None} for shape in shapes())
    with pytest.raises(ShapesDifferError, match="the number of KV heads"):
        pieces_of(mine, theirs, sending=False)
    assert pieces_of(mine, dict(mine), sending=False) is None


def test_equal_sizes_pair_equal_ranks_only() -> None:
    theirs, mine = shapes(2, 2)
    with pytest.raises(ShapesDifferError, match="rank: 0 here, 1 there"):
        pieces_of(mine, {**theirs, "rank": 1}, sending=False)


def test_a_rank_that_has_nothing_for_the_other_is_refused() -> None:
    theirs, mine = shapes(2, 1, heads=0)
    assert pieces_of(mine, theirs, sending=False) is not None
    with pytest.raises(ShapesDifferError, match="rank 1 of prefill has no heads for rank 0"):
        pieces_of(mine, {**theirs, "rank": 1}, sending=False)
