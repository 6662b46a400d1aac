"""Which workers of a D one worker of P sends to, and how much of every block travels to each. Pure.

The handshake decides what exactly travels (`regions.pieces_of`) and refuses what does not fit; sizes have to be known
before, because packets are planned and queued while a link may still be opening.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epd_serve.kv.heads import heads_of, links_of, senders_to


@dataclass(frozen=True)
class Route:
    """One worker of D.

    Attributes:
        rank: its tensor-parallel rank.
        senders: how many workers of P send to it.
        block_bytes: per layer, the bytes of one block that travel there.
    """

    rank: int
    senders: int
    block_bytes: tuple[int, ...]


def routes_of(shape: Mapping[str, Any], dst_tp: int) -> tuple[Route, ...]:
    """From the worker with this `shape` (`regions.shape_of`) to a D of `dst_tp` workers. Empty: others send for it.

    Raises:
        ValueError: the KV heads cannot be shared out to so many workers.
    """
    tp, rank = shape["tp"], shape["rank"]
    whole = tuple(sum(regions) for regions in shape["region_block_bytes"])
    if tp == dst_tp:
        return (Route(rank, 1, whole),)
    total = shape["kv_heads_total"] or 0  # unknown: the handshake refuses, by name
    held = len(heads_of(tp, rank, total))
    return tuple(
        Route(
            link.rank, senders_to(dst_tp, link.rank, tp, total), tuple(size * len(link.src) // held for size in whole)
        )
        for link in links_of(tp, rank, dst_tp, total)
    )
