"""Which KV heads go from which rank of P to which rank of D, and which bytes of a block they are. Pure.

Tensor parallelism shares out KV heads as vLLM does (`QKVParallelLinear`): with tp ≤ heads each rank holds heads / tp
adjacent ones; with tp > heads each head is held by tp / heads adjacent ranks. A cache without heads (MLA) is like one
head that every rank holds. Where a head has several holders at P, each of D's ranks is served by one of them, evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class HeadLink(NamedTuple):
    """What one rank of P sends to one rank of D. `src`, `dst`: the heads, counted from the first one of either rank."""

    rank: int
    src: range
    dst: range


@dataclass(frozen=True)
class Piece:
    """The bytes of every block that travel on one link: `rows` rows of `row_bytes` from `offset` on, `stride` apart."""

    offset: int
    rows: int
    row_bytes: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Of one block."""
        return self.rows * self.row_bytes


def heads_of(tp: int, rank: int, total_heads: int) -> range:
    """The heads that this rank holds, counted over the model. `total_heads` 0: a cache without heads, as one head.

    Raises:
        ValueError: no such rank, or heads that tensor parallelism of this size cannot share out.
    """
    total = max(1, total_heads)
    if not 0 <= rank < tp:
        raise ValueError(f"rank {rank} of tensor parallel size {tp}")
    if total % tp and tp % total:
        raise ValueError(f"{total} KV heads cannot be shared out to tensor parallel size {tp}")
    if tp <= total:
        return range(rank * total // tp, (rank + 1) * total // tp)
    return range(rank * total // tp, rank * total // tp + 1)


def link_of(src_tp: int, src_rank: int, dst_tp: int, dst_rank: int, total_heads: int) -> HeadLink | None:
    """What this rank of P sends to this rank of D. None: nothing, others send for it."""
    held = heads_of(src_tp, src_rank, total_heads)
    wanted = heads_of(dst_tp, dst_rank, total_heads)
    sent = [head for head in wanted if _source(head, src_tp, dst_rank, dst_tp, total_heads) == src_rank]
    if not sent:
        return None
    first, count = sent[0], len(sent)  # adjacent, as both ends hold adjacent heads
    return HeadLink(dst_rank, _range(first - held.start, count), _range(first - wanted.start, count))


def links_of(src_tp: int, src_rank: int, dst_tp: int, total_heads: int) -> tuple[HeadLink, ...]:
    """The ranks of D that this rank of P sends to, with the heads on each link; may be none."""
    links = (link_of(src_tp, src_rank, dst_tp, dst_rank, total_heads) for dst_rank in range(dst_tp))
    return tuple(link for link in links if link is not None)


def senders_to(dst_tp: int, dst_rank: int, src_tp: int, total_heads: int) -> int:
    """How many ranks of P send to this rank of D."""
    wanted = heads_of(dst_tp, dst_rank, total_heads)
    return len({_source(head, src_tp, dst_rank, dst_tp, total_heads) for head in wanted})


def piece_of(block_bytes: int, rows: int, held: int, heads: range) -> Piece:
    """The bytes of `heads` in a block of `rows` rows, each of `held` heads one after the other.

    A block of [heads, block_size, …] has one row, one of [block_size, heads, …] has block_size, one of
    [2, block_size, heads, …] twice as many.

    Raises:
        ValueError: the block cannot be divided so.
    """
    if rows <= 0 or held <= 0 or block_bytes <= 0 or block_bytes % (rows * held):
        raise ValueError(f"a block of {block_bytes} bytes is not {rows} rows of {held} heads")
    if not 0 <= heads.start < heads.stop <= held:
        raise ValueError(f"heads {heads.start} to {heads.stop} of {held}")
    if len(heads) == held:
        return Piece(0, 1, block_bytes, block_bytes)
    stride = block_bytes // rows
    head_bytes = stride // held
    return Piece(heads.start * head_bytes, rows, len(heads) * head_bytes, stride)


def copies(src: Piece, dst: Piece) -> Iterator[tuple[int, int, int]]:
    """(offset in the source block, offset in the destination block, bytes) of each contiguous copy of one block.

    Raises:
        ValueError: the pieces differ in size, or neither's rows divide the other's.
    """
    step = min(src.row_bytes, dst.row_bytes)
    if src.nbytes != dst.nbytes or src.row_bytes % step or dst.row_bytes % step:
        raise ValueError(f"{src} does not fit {dst}")
    for at in range(0, src.nbytes, step):
        yield _locate(src, at), _locate(dst, at), step


def _locate(piece: Piece, at: int) -> int:
    row, inside = divmod(at, piece.row_bytes)
    return piece.offset + row * piece.stride + inside


def _source(head: int, src_tp: int, dst_rank: int, dst_tp: int, total_heads: int) -> int:
    """The rank of P that sends this head to this rank of D: the same rank where both sizes are equal."""
    total = max(1, total_heads)
    if src_tp <= total:
        return head * src_tp // total
    holders = src_tp // total
    served = max(1, dst_tp // total)
    return head * holders + dst_rank % served * holders // served


def _range(start: int, count: int) -> range:
    return range(start, start + count)
