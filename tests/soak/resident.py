"""Memory of a process."""

from __future__ import annotations

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
