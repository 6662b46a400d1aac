"""The KV cache as bytes: each layer is a list of regions, each region a row of equal blocks.

CPU and CUDA keep one tensor per layer with the block index first, some CUDA backends put K and V first, Ascend keeps K
and V (or more, for MLA) apart. Blocks move as opaque bytes; the shape that both ends of a link exchange says what must
agree for that to be right. Where tensor-parallel sizes differ a link carries some heads of every block, and the shape
says where heads lie in a block; `epd_serve.kv.heads` says whose they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epd_serve.kv.heads import Piece, heads_of, link_of, piece_of
from npu_ops.blocks import Blocks


@dataclass(frozen=True)
class Region:
    """Flat bytes of one region: `data` is uint8 of [num_blocks * block_bytes], a view of the KV cache.

    Attributes:
        dims: sizes of a block's axes in the order of memory, e.g. (block_size, heads, head_dim).
        kernel_blocks: of how many blocks of the attention kernel a block consists; more than one is its first axis.
    """

    data: torch.Tensor
    block_bytes: int
    dims: tuple[int, ...] = ()
    kernel_blocks: int = 1

    def blocks(self, first: int, count: int) -> torch.Tensor:
        """Bytes of adjacent blocks, a view of [count * block_bytes]."""
        return self.data[first * self.block_bytes : (first + count) * self.block_bytes]

    def part(self, first: int, count: int, piece: Piece) -> torch.Tensor:
        """The bytes of a piece of adjacent blocks, a view of [count, rows, row_bytes]."""
        return self.cut(piece).part(first, count)

    def cut(self, piece: Piece) -> Blocks:
        """A piece of every block, as devices gather and scatter it."""
        return Blocks(self.data, self.block_bytes, piece.offset, piece.rows, piece.row_bytes, piece.stride)


Layers = tuple[tuple[Region, ...], ...]


def flat_regions(layers: Layers) -> list[torch.Tensor]:
    """The bytes of all regions, in order of layers."""
    return [region.data for layer in layers for region in layer]


Pieces = tuple[tuple[Piece, ...], ...]  # per layer, per region


@dataclass(frozen=True)
class LinkPieces:
    """What of every block travels on one link: of this end's own blocks, and of the other end's. Equal in bytes."""

    mine: Pieces
    theirs: Pieces


def cut_layers(layers: Layers, pieces: Pieces, first: int, last: int) -> list[Blocks]:
    """The pieces of the regions of layers [first, last), in the order of a packet's bytes."""
    return [
        region.cut(piece)
        for regions, cut in zip(layers[first:last], pieces[first:last], strict=True)
        for region, piece in zip(regions, cut, strict=True)
    ]


class ShapesDifferError(ValueError):
    """KV bytes do not mean the same on both ends; the message names what differs."""


def layers_of(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], num_blocks: int) -> Layers:
    """View vLLM's KV caches (layer name → tensor or tensors) as regions, in layer order.

    Args:
        num_blocks: of vLLM's scheduler. Where an attention kernel takes smaller blocks, vLLM makes the cache of those,
            and a block of the scheduler's is that many of them, one after the other.

    Raises:
        ValueError: a tensor whose blocks are not each contiguous, or that has no dimension of `num_blocks`.
    """
    return tuple(
        tuple(
            region
            for tensor in ([cache] if isinstance(cache, torch.Tensor) else cache)
            for region in _regions(name, tensor, num_blocks)
        )
        for name, cache in kv_caches.items()
    )


def _regions(name: str, tensor: torch.Tensor, num_blocks: int) -> list[Region]:
    whole = [size == num_blocks for size in tensor.shape[:2]]
    split = [size > num_blocks and size % num_blocks == 0 for size in tensor.shape[:2]]
    for blocks in (whole, split):
        if blocks[0]:
            return [_flat(name, tensor, num_blocks)]
        if any(blocks):
            return [_flat(name, part, num_blocks) for part in tensor]
    raise ValueError(f"KV cache of {name}: shape {tuple(tensor.shape)} has no dimension of {num_blocks} blocks")


def _flat(name: str, tensor: torch.Tensor, num_blocks: int) -> Region:
    size = tensor.element_size()
    kernel_blocks = tensor.shape[0] // num_blocks
    block_bytes = tensor[0].numel() * size
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True), key=lambda axis: -axis[0])
    span = 1 + sum((n - 1) * stride for stride, n in inner)
    if span * size != block_bytes or tensor.stride(0) * size != block_bytes:
        raise ValueError(f"KV cache of {name}: blocks are not contiguous (stride {tensor.stride()})")
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.shape[0] * block_bytes,))
    dims = (*((kernel_blocks,) if kernel_blocks > 1 else ()), *(n for _, n in inner))
    return Region(flat, kernel_blocks * block_bytes, dims, kernel_blocks)


def whole_blocks(layers: Layers) -> Pieces:
    """The pieces of a link that carries all of every block."""
    return tuple(tuple(Piece(0, 1, region.block_bytes, region.block_bytes) for region in layer) for layer in layers)


def shape_of(
    layers: Layers,
    *,
    names: Iterable[str],
    block_size: int,
    dtype: str,
    tp: int,
    rank: int,
    platform: str,
    kv_heads_total: int | None = None,
    layout: str = "",
) -> dict[str, Any]:
    """What the handshake compares: the same on both ends means that bytes mean the same.

    Args:
        names: of the layers, as vLLM's hooks say them. Equal on both ends, or what is one layer here is another there.
        kv_heads_total: KV heads of the model; 0: a cache without heads (MLA); None: not known.
        layout: vLLM's name for the order of axes in this very cache (`LBHNC`, `NHD`), or "". It decides only where
            sizes do not, because a block has as many tokens as heads.

    Returns:
        Of plain values, with `head_rows` per layer and region: how many rows of heads a block consists of (`piece_of`),
        0 where that is unknown.
    """
    held = 0 if kv_heads_total is None else len(heads_of(tp, rank, kv_heads_total))
    tokens_first = None if not {"H", "N"} <= set(layout) else layout.index("N") < layout.index("H")
    return {
        "layers": len(layers),
        "layer_names": list(names),
        "block_axes": [[list(region.dims) for region in layer] for layer in layers],
        "region_block_bytes": [[region.block_bytes for region in layer] for layer in layers],
        "block_size": block_size,
        "dtype": dtype,
        "tp": tp,
        "rank": rank,
        "platform": platform,
        "kv_heads_total": kv_heads_total,
        "head_rows": [
            [_head_rows(region.dims, held, block_size // region.kernel_blocks, tokens_first) for region in layer]
            for layer in layers
        ],
    }


def _head_rows(dims: Sequence[int], held: int, block_size: int, tokens_first: bool | None) -> int:
    """Heads and tokens are neighbours among a block's axes, in either order, with the content of a token last."""
    if held == 1:
        return 1  # the block is that head
    found: dict[int, bool] = {}  # rows: whether tokens come first
    for at, pair in enumerate(itertools.pairwise(dims[:-1])):
        if pair == (held, block_size):
            found[math.prod(dims[:at])] = False
        if pair == (block_size, held):
            found[math.prod(dims[: at + 1])] = True
    if len(found) > 1 and tokens_first is not None:
        found = {rows: order for rows, order in found.items() if order is tokens_first}
    return next(iter(found)) if len(found) == 1 else 0


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """One line naming what differs, or ""; of lists that are as long, the first place where they do."""
    return "; ".join(
        _difference(name, mine.get(name), theirs.get(name))
        for name in sorted(set(mine) | set(theirs))
        if mine.get(name) != theirs.get(name)
    )


def _difference(name: str, mine: Any, theirs: Any) -> str:
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        place = next(place for place, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other)
        name, mine, theirs = f"{name}[{place}]", mine[place], theirs[place]
    return f"{name}: {mine!r} here, {theirs!r} there"


_DIFFERS_WITH_TP = ("tp", "rank", "region_block_bytes", "block_axes", "head_rows")


def pieces_of(mine: Mapping[str, Any], theirs: Mapping[str, Any], *, sending: bool) -> LinkPieces | None:
    """What travels between two ranks with these shapes (`shape_of`); None: whole blocks, as tp is equal.

    Args:
        sending: `mine` is P's.

    Raises:
        ShapesDifferError: nothing can travel. `theirs` came over the wire and may hold anything.
    """
    my_tp, their_tp = mine.get("tp"), theirs.get("tp")
    same = () if my_tp == their_tp else _DIFFERS_WITH_TP
    rest = [{name: value for name, value in shape.items() if name not in same} for shape in (mine, theirs)]
    if reason := differences(*rest):
        raise ShapesDifferError(reason)
    if my_tp == their_tp:
        return None
    total, sizes = mine.get("kv_heads_total"), f"tp: {my_tp!r} here, {their_tp!r} there"
    if total is None:
        raise ShapesDifferError(f"{sizes}; that needs the number of KV heads, which is not known")
    try:
        src, dst = (mine, theirs) if sending else (theirs, mine)
        link = link_of(src["tp"], src["rank"], dst["tp"], dst["rank"], total)
        if link is None:
            raise ShapesDifferError(f"{sizes}; rank {src['rank']} of prefill has no heads for rank {dst['rank']}")
        own, other = (link.src, link.dst) if sending else (link.dst, link.src)
        pieces = LinkPieces(_pieces(mine, own), _pieces(theirs, other))
    except ShapesDifferError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ShapesDifferError(f"{sizes}; {error}") from error
    if len(own) > 1 and mine["head_rows"] != theirs["head_rows"]:  # the bytes of one head have one order
        raise ShapesDifferError(f"{sizes}; head_rows: {mine['head_rows']} here, {theirs['head_rows']} there")
    if _sizes(pieces.mine) != _sizes(pieces.theirs):
        raise ShapesDifferError(f"{sizes}; bytes of a block: {_sizes(pieces.mine)} here, {_sizes(pieces.theirs)} there")
    return pieces


def _pieces(shape: Mapping[str, Any], heads: range) -> Pieces:
    held = len(heads_of(shape["tp"], shape["rank"], shape["kv_heads_total"]))
    sizes, rows = shape["region_block_bytes"], shape["head_rows"]
    if any(0 in layer for layer in rows) and len(heads) < held:
        raise ValueError("that needs to know where heads lie in a block, which the cache's shape does not tell")
    return tuple(
        tuple(
            piece_of(size, count, held, heads) if count else Piece(0, 1, size, size)
            for size, count in zip(*layer, strict=True)
        )
        for layer in zip(sizes, rows, strict=True)
    )


def _sizes(pieces: Pieces) -> list[list[int]]:
    return [[piece.nbytes for piece in layer] for layer in pieces]
