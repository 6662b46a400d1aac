"""Which workers of D a worker of P sends to."""

from __future__ import annotations

from typing import Any

import pytest

from epd_serve.engine.kv.routes import Route, routes_of


def of(tp: int, rank: int, heads: int | None) -> dict[str, Any]:
    return {"tp": tp, "rank": rank, "kv_heads_total": heads, "region_block_bytes": [[32, 32], [64]]}


@pytest.mark.parametrize("rank", [0, 1])
def test_equal_sizes_pair_rank_with_rank_and_send_whole_blocks(rank: int) -> None:
    assert routes_of(of(2, rank, None), 2) == (Route(rank, 1, (64, 64)),)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_workers_send_all_they_have_to_one(rank: int) -> None:
    assert routes_of(of(2, rank, 4), 1) == (Route(0, 2, (64, 64)),)


def test_one_worker_sends_half_of_its_heads_to_each_of_two() -> None:
    assert routes_of(of(1, 0, 4), 2) == (Route(0, 1, (32, 32)), Route(1, 1, (32, 32)))


def test_of_workers_that_hold_the_same_heads_one_sends() -> None:
    """Four workers of P, two KV heads, two workers of D."""
    senders = [routes_of(of(4, rank, 2), 2) for rank in range(4)]
    assert sorted(route.rank for routes in senders for route in routes) == [0, 1]
    assert all(route == Route(route.rank, 1, (64, 64)) for routes in senders for route in routes)


def test_a_cache_without_heads_goes_whole_to_every_worker() -> None:
    assert routes_of(of(1, 0, 0), 2) == (Route(0, 1, (64, 64)), Route(1, 1, (64, 64)))
