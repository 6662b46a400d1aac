"""Memory of a process, and how it grows. The figures are pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """MiB. `rss_mb`: everything in memory; `uss_mb`: what nobody else has, which is what its end would free."""

    rss_mb: float
    uss_mb: float

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.rss_mb + other.rss_mb, self.uss_mb + other.uss_mb)


def resident(pids: Sequence[int]) -> Resident:
    """Of these processes together. Raises OSError when one of them is gone."""
    total = Resident(0.0, 0.0)
    for pid in pids:
        total += parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))
    return total


def parse_rollup(text: str) -> Resident:
    """From the kernel's summary (`smaps_rollup`, kB)."""
    kib = {line.split(":")[0]: float(line.split()[1]) for line in text.splitlines() if line.endswith(" kB")}
    return Resident(kib["Rss"] / 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024)


def growth(points: Sequence[tuple[float, float]], per: float) -> float:
    """How much the second value grows while the first grows by `per`: the median slope over all pairs of points, which
    a single step up or down does not bend (Theil and Sen). Of at least two different first values."""
    slopes = [(y1 - y0) / (x1 - x0) for at, (x0, y0) in enumerate(points) for x1, y1 in points[at + 1 :] if x1 != x0]
    return statistics.median(slopes) * per
