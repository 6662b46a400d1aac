"""From P→D transfers to rows, and from rows to medians, ratios within a round, named figures and the table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.micro.measurement import Row
from bench.micro.pd.transfers import Transfer
from bench.micro.rows import grouped, quartiles, ratios
from bench.statistic import Spread

BASE = "bulk"
"""The mode that nothing hides: what the others are held against."""

MEASURES = ("packets", "kv_ms", "span_ms", "exposed_ms", "overlap", "gb_per_s", "ttft_ms")
RATIOS = {"exposed": "exposed_ms", "kv": "kv_ms", "ttft": "ttft_ms"}


@dataclass(frozen=True)
class Cell:
    """One mode in one case: every measure, and by ratio's name what it is to bulk within a round.

    Attributes:
        transport: or path of a single GPU, whose figures begin with `prefix`. concurrency: requests at one time.
    """

    prefix: str
    transport: str
    concurrency: int
    tokens: int
    mode: str
    measures: dict[str, Spread]
    over_base: dict[str, Spread]

    @property
    def suffix(self) -> str:
        """What its figures' names end with: nothing for one request at a time over shared memory."""
        transport = "" if self.transport == "shm" else f"_{self.transport}"
        return transport + ("" if self.concurrency == 1 else f"_c{self.concurrency}")


def row_of(transfer: Transfer, ttft_s: Sequence[float], **case: Any) -> Row:
    """All that is kept of requests that were sent together.

    Args:
        transfer: theirs together. ttft_s: what each one's client waited.
        case: transport, tokens, concurrency, mode, round.
    """
    return {
        "kind": "real",
        **case,
        "groups": list(transfer.groups),
        "packets": len(transfer.packets),
        "bytes": transfer.nbytes,
        "kv_ms": round(transfer.link_s * 1e3, 4),
        "span_ms": round(transfer.span_s * 1e3, 4),
        "exposed_ms": round(transfer.exposed_s * 1e3, 4),
        "overlap": round(transfer.overlap, 4),
        "gb_per_s": round(transfer.bytes_per_s / 1e9, 3),
        "ttft_ms": round(float(np.median(ttft_s)) * 1e3, 4),
    }


def cells(rows: Iterable[Row]) -> list[Cell]:
    """By transport and concurrency (in the order of their names' suffixes), length, and in the order of the modes'
    first rows."""
    real = [row for row in rows if row.get("kind") == "real"]
    cases = grouped([{"device": "real", **row} for row in real], "device", "transport", "concurrency", "tokens", "mode")
    found = []
    for (device, transport, concurrency, tokens, mode), own in cases.items():
        base = cases.get((device, transport, concurrency, tokens, BASE), [])
        over = {name: ratios(own, base, measure) for name, measure in RATIOS.items()}
        measures = {name: Spread.of([row[name] for row in own]) for name in MEASURES}
        over_base = {name: spread for name, spread in over.items() if spread}
        found.append(Cell(device, transport, concurrency, tokens, mode, measures, over_base))
    return sorted(found, key=lambda cell: (cell.suffix, cell.tokens))


def figures(rows: Iterable[Row]) -> dict[str, float]:
    """`real_exposed_adaptive_over_bulk_1024`, `real_packets_adaptive_1024`, `real_overlap_1024_adaptive`, …; other
    transports and concurrencies have a suffix (`Cell.suffix`), those of a GPU begin with `cuda`."""
    named: dict[str, float] = {}
    for cell in cells(rows):
        mode, tokens, prefix, suffix = cell.mode.replace(":", ""), cell.tokens, cell.prefix, cell.suffix
        for name, spread in cell.measures.items():
            which = f"{tokens}_{mode}" if name == "overlap" else f"{mode}_{tokens}"
            named[f"{prefix}_{name}_{which}{suffix}"] = spread.median
        if cell.mode != BASE:
            for name, ratio in cell.over_base.items():
                named |= quartiles(f"{prefix}_{name}_{mode}_over_{BASE}_{tokens}{suffix}", ratio)
    return named
