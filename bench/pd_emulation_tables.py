"""What the emulation of P→D transfers found, as tables to print beside the paper's numbers. Pure.

Owns the rows' shape and which row is meant by a mode, a length and a device. How they come about is
`bench/pd_emulation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.devices import atlas_800i_a2 as paper
from deploy.placement_table import table

SOURCED = "as sourced"
BULK_NAME, ADAPTIVE_NAME, LATE_NAME = "bulk", "adaptive", "layerwise, late"

Row = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """Adaptive against every fixed size, 1 … L (L is bulk), for one length and concurrency."""

    tokens: int
    concurrency: int
    adaptive_s: float
    best_fixed_s: float
    best_fixed: int

    @property
    def ratio(self) -> float:
        """1 where neither exposes anything."""
        if self.best_fixed_s == 0:
            return 1.0 if self.adaptive_s == 0 else float("inf")
        return self.adaptive_s / self.best_fixed_s


def one(rows: Sequence[Row], mode: str, tokens: int, device: str = SOURCED) -> Row:
    """The row of that mode and length at the paper's concurrency."""
    wanted = (device, mode, tokens, paper.CONCURRENCY)
    (found,) = (row for row in rows if (row["device"], row["mode"], row["tokens"], row["concurrency"]) == wanted)
    return found


def kv_over_bulk(rows: Sequence[Row], device: str = SOURCED) -> float:
    """How much longer 256-token prompts keep the link busy when they are grouped adaptively."""
    adaptive, bulk = (one(rows, mode, 256, device)["kv_ms"] for mode in (ADAPTIVE_NAME, BULK_NAME))
    return float(adaptive / bulk)


def modes_table(title: str, rows: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [
        ("tokens", "concurrency", "mode", "packets", "KV ms", "exposed ms", "overlap", "GB/s")
    ]
    for row in sorted(rows, key=lambda row: (row["concurrency"], row["tokens"])):
        lines.append(
            (
                str(row["tokens"]),
                str(row["concurrency"]),
                row["mode"],
                str(row["packets"]),
                f"{row['kv_ms']:.1f}",
                f"{row['exposed_ms']:.2f}",
                f"{row['overlap']:.2%}",
                f"{row['gb_per_s']:.2f}",
            )
        )
    return f"{title}\n\n{table(lines)}"


def table_4(rows: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [
        ("tokens", "", "KV ms", "paper", "exposed ms", "paper", "overlap", "paper", "GB/s", "paper")
    ]
    for tokens in paper.LAYERWISE:
        for mode, printed in ((LATE_NAME, paper.LAYERWISE[tokens]), (ADAPTIVE_NAME, paper.OPTIMISED[tokens])):
            row = one(rows, mode, tokens)
            lines.append(
                (
                    str(tokens),
                    mode,
                    f"{row['kv_ms']:.1f}",
                    f"{printed.kv_ms:.1f}",
                    f"{row['exposed_ms']:.1f}",
                    f"{printed.exposed_ms:.1f}",
                    f"{row['overlap']:.2%}",
                    f"{printed.overlap:.2%}",
                    f"{row['gb_per_s']:.2f}",
                    f"{printed.bandwidth_gb_per_s:.2f}",
                )
            )
    return f"Table 4 in shape; 1024 tokens set the link's line, 2048 tokens are predicted\n\n{table(lines)}"


def best_fixed_table(compared: Sequence[Compared]) -> str:
    lines: list[tuple[str, ...]] = [
        ("tokens", "concurrency", "adaptive exposed ms", "best fixed size", "its exposed ms", "ratio")
    ]
    for found in compared:
        lines.append(
            (
                str(found.tokens),
                str(found.concurrency),
                f"{found.adaptive_s * 1e3:.3f}",
                str(found.best_fixed),
                f"{found.best_fixed_s * 1e3:.3f}",
                f"{found.ratio:.4f}",
            )
        )
    return f"adaptive against every fixed size and bulk\n\n{table(lines)}"


def table_2(served: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [
        (
            "requests/s",
            "device",
            "P's load",
            "exposed ms, late",
            "adaptive",
            "paper's TTFT ms",
            "less exposed",
            "",
            "paper",
        )
    ]
    for row in served:
        lines.append(
            (
                f"{row['rate']:g}",
                row["device"],
                f"{row['load']:.0%}",
                f"{row['baseline_exposed_ms']:.1f}",
                f"{row['adaptive_exposed_ms']:.1f}",
                f"{row['baseline_ttft_ms']:.1f}",
                f"{row['ttft_ms']:.1f}",
                f"{row['ttft_change']:+.1%}",
                f"{row['paper_ttft_change']:+.1%}",
            )
        )
    return (
        "Table 2 in shape: the paper's own baseline TTFT, less what the emulation exposes less; all else as the paper "
        f"has it. A load above 100 % has no mean, only a queue that grows\n\n{table(lines)}"
    )


def sensitivity_table(rows: Sequence[Row], compared: Mapping[str, Sequence[Compared]]) -> str:
    def overlap(device: str, mode: str, tokens: int) -> str:
        return f"{one(rows, mode, tokens, device)['overlap']:.2%}"

    lines: list[tuple[str, ...]] = [
        ("device", "late 1024", "adaptive 1024", "adaptive 2048", "worst over best fixed", "KV over bulk 256")
    ]
    for device, found in compared.items():
        lines.append(
            (
                device,
                overlap(device, LATE_NAME, 1024),
                overlap(device, ADAPTIVE_NAME, 1024),
                overlap(device, ADAPTIVE_NAME, 2048),
                f"{max(each.ratio for each in found):.4f}",
                f"{kv_over_bulk(rows, device):.4f}",
            )
        )
    return f"sensitivity: overlap, exposed time over the best fixed size, KV latency over bulk\n\n{table(lines)}"
