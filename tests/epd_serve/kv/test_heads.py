"""Heads between tensor-parallel sizes: every head of every rank of D comes from exactly one rank of P."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.kv.heads import Piece, copies, heads_of, links_of, piece_of, senders_to

SIZES = (1, 2, 4, 8)


def divides(tp: int, heads: int) -> bool:
    return heads == 0 or heads % tp == 0 or tp % heads == 0


PAIRS = [(s, d, h) for h in range(17) for s in SIZES for d in SIZES if divides(s, h) and divides(d, h)]


@pytest.mark.parametrize("heads", range(17))
def test_every_head_of_every_rank_of_decode_is_sent_once_by_a_rank_that_holds_it(heads: int) -> None:
    for src_tp, dst_tp, _ in (pair for pair in PAIRS if pair[2] == heads):
        arrived: Counter[tuple[int, int]] = Counter()
        senders: Counter[int] = Counter()
        for src_rank in range(src_tp):
            held = heads_of(src_tp, src_rank, heads)
            for rank, src, dst in links_of(src_tp, src_rank, dst_tp, heads):
                wanted = heads_of(dst_tp, rank, heads)
                assert src.step == dst.step == 1
                assert [held[i] for i in src] == [wanted[i] for i in dst]
                arrived.update((rank, head) for head in dst)
                senders[rank] += 1
        assert arrived == {(r, i): 1 for r in range(dst_tp) for i in range(len(heads_of(dst_tp, r, heads)))}
        assert senders == {rank: senders_to(dst_tp, rank, src_tp, heads) for rank in range(dst_tp)}


@pytest.mark.parametrize("heads", range(17))
def test_equal_sizes_send_whole_blocks_to_the_same_rank(heads: int) -> None:
    for tp in (tp for tp in SIZES if divides(tp, heads)):
        for rank in range(tp):
            ((to, src, dst),) = links_of(tp, rank, tp, heads)
            assert to == rank
            assert src == dst == range(len(heads_of(tp, rank, heads)))


@given(st.sampled_from(PAIRS), st.integers(1, 3), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["first", "tokens"]))
def test_every_byte_of_a_block_of_decode_is_written_once_with_the_right_byte_of_prefill(
    pair: tuple[int, int, int], head_bytes: int, block_size: int, axis: str
) -> None:
    """Each byte of the model's block carries a number; each rank of D has to end with its own numbers."""
    src_tp, dst_tp, heads = pair
    whole = [[[(h, t, b) for b in range(head_bytes)] for t in range(block_size)] for h in range(max(1, heads))]

    def block(tp: int, rank: int) -> list[tuple[int, int, int]]:
        held = heads_of(tp, rank, heads)
        if axis == "first":
            return [byte for h in held for t in range(block_size) for byte in whole[h][t]]
        return [byte for t in range(block_size) for h in held for byte in whole[h][t]]

    rows = 1 if axis == "first" else block_size
    written: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(dst_tp)]
    for src_rank in range(src_tp):
        source, held = block(src_tp, src_rank), len(heads_of(src_tp, src_rank, heads))
        for rank, src, dst in links_of(src_tp, src_rank, dst_tp, heads):
            there = len(heads_of(dst_tp, rank, heads))
            mine = piece_of(len(source), rows, held, src)
            theirs = piece_of(len(source) // held * there, rows, there, dst)
            assert mine.nbytes == theirs.nbytes
            for at, to, size in copies(mine, theirs):
                for i in range(size):
                    assert to + i not in written[rank]
                    written[rank][to + i] = source[at + i]
    for rank in range(dst_tp):
        assert [written[rank].get(i) for i in range(len(block(dst_tp, rank)))] == block(dst_tp, rank)


@pytest.mark.parametrize("dst_tp", SIZES)
def test_holders_of_one_head_share_the_work(dst_tp: int) -> None:
    links = [len(links_of(4, rank, dst_tp, 0)) for rank in range(4)]
    assert sum(links) == dst_tp
    assert max(links) - min(links) <= 1


@pytest.mark.parametrize(
    ("rows", "heads", "piece"),
    [
        (1, range(1, 3), Piece(8, 1, 16, 32)),  # [heads 4, block_size 4, 2 bytes]
        (4, range(1, 3), Piece(2, 4, 4, 8)),  # [block_size 4, heads 4, 2 bytes]
        (1, range(4), Piece(0, 1, 32, 32)),
        (4, range(4), Piece(0, 1, 32, 32)),  # all heads: no rows to tell apart
    ],
)
def test_a_piece_is_where_the_layout_puts_its_heads(rows: int, heads: range, piece: Piece) -> None:
    assert piece_of(32, rows, 4, heads) == piece


@pytest.mark.parametrize(
    ("block_bytes", "rows", "held", "heads"),
    [(30, 1, 4, range(1)), (32, 0, 4, range(1)), (32, 1, 0, range(1)), (32, 1, 4, range(3, 5)), (32, 1, 4, range(0))],
)
def test_a_block_that_cannot_be_cut_so_is_refused(block_bytes: int, rows: int, held: int, heads: range) -> None:
    with pytest.raises(ValueError, match=r"block of|heads"):
        piece_of(block_bytes, rows, held, heads)


def test_pieces_of_different_size_do_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        list(copies(Piece(0, 1, 32, 32), Piece(0, 2, 8, 16)))
    with pytest.raises(ValueError, match="does not fit"):
        list(copies(Piece(0, 2, 12, 16), Piece(0, 3, 8, 16)))


@pytest.mark.parametrize(("tp", "rank", "heads"), [(2, 0, 3), (4, 0, 6), (2, 2, 4), (2, -1, 4)])
def test_what_vllm_does_not_share_out_is_refused(tp: int, rank: int, heads: int) -> None:
    with pytest.raises(ValueError, match="tensor parallel size"):
        heads_of(tp, rank, heads)
