"""KV between instances of different tensor-parallel sizes, over real links: every head arrives once, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epd_serve.engine.kv.sender import ChunkJob
from epd_serve.kv.heads import heads_of
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, DecodeEnd, Ends, PrefillEnd, key_of
from tests.waiting import wait_for

BLOCKS, DIM, LAYERS = 8, 3, 3
PAIRS = {1: 5, 2: 4, 6: 0, 7: 1}
LAYOUTS = {"heads first": lambda kv: kv, "tokens first": lambda kv: kv.transpose(1, 2)}


def model(heads: int) -> list[torch.Tensor]:
    """Per layer the cache of the whole model: [blocks, heads, block_size, dim]."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(BLOCKS, heads, BLOCK_SIZE, DIM, generator=generator) for _ in range(LAYERS)]


def held(whole: list[torch.Tensor], tp: int, rank: int, layout: str) -> dict[str, torch.Tensor]:
    """One rank's cache, in the layout of its kernels."""
    heads = heads_of(tp, rank, whole[0].shape[1])
    return {
        f"layer.{i}": LAYOUTS[layout](kv[:, heads.start : heads.stop]).contiguous().clone()
        for i, kv in enumerate(whole)
    }


def ends(
    start: Ends, src_tp: int, dst_tp: int, heads: int | None, layout: str, **options: Any
) -> tuple[list[PrefillEnd], list[DecodeEnd]]:
    whole = model(heads or 6)
    shape = {"blocks": BLOCKS, "kv_heads_total": heads, "dtype": "torch.float32"}
    senders = [
        start(PrefillEnd, kv=held(whole, src_tp, rank, layout), tp=src_tp, rank=rank, **shape, **options)
        for rank in range(src_tp)
    ]
    zeros = [torch.zeros_like(kv) for kv in whole]
    receivers = [
        start(DecodeEnd, kv=held(zeros, dst_tp, rank, layout), tp=dst_tp, rank=rank, **shape) for rank in range(dst_tp)
    ]
    return senders, receivers


def job(receivers: list[DecodeEnd], name: str, pairs: dict[int, int], *, last: bool = True) -> ChunkJob:
    endpoints = tuple(end.endpoint for end in receivers)
    return ChunkJob(
        key_of(name), name, receivers[0].target, endpoints, tuple(pairs), tuple(pairs.values()), 0 if last else 16
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "heads"), [(2, 1, 6), (1, 2, 6), (2, 4, 12), (4, 2, 2), (2, 4, 2), (2, 1, 1), (1, 2, 1)]
)
def test_every_rank_of_decode_gets_its_heads(start: Ends, layout: str, src_tp: int, dst_tp: int, heads: int) -> None:
    senders, receivers = ends(start, src_tp, dst_tp, heads, layout)
    for d in receivers:
        d.expect(key_of("a"), PAIRS.values())
    for p in senders:
        p.step([job(receivers, "a", PAIRS)], finished=["a"])
    for d in receivers:
        d.wait_ended(1)
        assert d.received
    for p in senders:
        p.wait_over({"a"})  # also those that had nothing to send
    for rank, d in enumerate(receivers):
        wanted = held(model(heads), dst_tp, rank, layout)
        for name, theirs in d.caches.items():
            expected = torch.zeros_like(theirs)
            for src, dst in PAIRS.items():
                expected[dst] = wanted[name][src]
            assert torch.equal(theirs, expected)


def test_a_transfer_is_over_when_every_worker_of_prefill_has_said_so(start: Ends) -> None:
    senders, (d,) = ends(start, 2, 1, 6, "heads first")
    d.expect(key_of("a"), [5])
    senders[0].step([job([d], "a", {1: 5})])
    wait_for(lambda: senders[0].sender.report()[0].transfers == 1)
    assert not d.poll()
    senders[1].step([job([d], "a", {1: 5})])
    d.wait_ended(1)
    assert d.received


def test_a_worker_of_decode_that_is_slow_keeps_no_other_from_its_part(start: Ends) -> None:
    (p,), (slow, quick) = ends(start, 1, 2, 6, "heads first", staging_bytes=4096)
    quick.expect(key_of("a"), PAIRS.values())
    slow.close()  # takes nothing
    p.step([job([slow, quick], "a", PAIRS)])
    quick.wait_ended(1)
    assert quick.received


def test_a_transfer_that_is_stopped_ends_at_every_worker_of_decode(start: Ends) -> None:
    (p,), receivers = ends(start, 1, 2, 6, "heads first")
    for d in receivers:
        d.expect(key_of("a"), [5])
    p.step([job(receivers, "a", {1: 5}, last=False)])
    p.step(stops=["a"], finished=["a"])
    p.wait_over({"a"})
    for d in receivers:
        d.wait_ended(1)
        assert d.failed


def test_sizes_of_which_nothing_is_known_about_heads_are_refused_by_name(
    start: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    (p,), receivers = ends(start, 1, 2, None, "heads first")
    p.step([job(receivers, "a", {1: 5})], finished=["a"])
    p.wait_over({"a"})
    assert "tp: 2 here, 1 there" in caplog.text
    assert "that needs the number of KV heads" in caplog.text
