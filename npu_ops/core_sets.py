"""Which CPU cores a virtual device is, and how a device's cores are divided by shares. Pure arithmetic.

Only the OpenMP workers of a device's stages are pinned to its cores; servers float.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9  # 0.7 of 10 cores is 7, whatever 0.7 is in binary


class TooFewCoresError(ValueError):
    """There are fewer cores than shares of them."""


@dataclass(frozen=True)
class CoreSets:
    """Core ids by virtual device; `oversubscribed` when devices have to share cores."""

    sets: Mapping[int, tuple[int, ...]]
    oversubscribed: bool

    def of(self, devices: Iterable[int]) -> tuple[int, ...]:
        """Cores of the given virtual devices together, ascending, each once."""
        return tuple(sorted({core for device in devices for core in self.sets[device]}))

    def divided(self, devices: Iterable[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
        """The cores of the devices as disjoint runs of neighbours, one per share. Raises TooFewCoresError."""
        cores = self.of(devices)
        ends = list(itertools.accumulate(apportion(len(cores), shares), initial=0))
        return [cores[start:end] for start, end in itertools.pairwise(ends)]


def core_sets(devices: int, cores: Iterable[int] | None = None) -> CoreSets:
    """Divide cores among virtual devices.

    With enough cores each device gets a run of neighbours (they share caches and a NUMA node), sizes differing by at
    most one; with too few, devices take single cores round-robin.

    Args:
        devices: how many virtual devices, at least 1.
        cores: core ids to use; by default those this process may run on.
    """
    assert devices >= 1
    usable = sorted(os.sched_getaffinity(0) if cores is None else cores)
    assert usable
    if len(usable) < devices:
        alone = {device: (usable[device % len(usable)],) for device in range(devices)}
        return CoreSets(alone, oversubscribed=True)
    bounds = [len(usable) * device // devices for device in range(devices + 1)]
    runs = {device: tuple(usable[start:end]) for device, (start, end) in enumerate(itertools.pairwise(bounds))}
    return CoreSets(runs, oversubscribed=False)


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole cores for shares of `total` cores: at least one each, together no more than the shares' sum says.

    Rounded down; what that leaves goes to those that lost most by it. Every process that is given the same shares in
    the same order finds the same numbers, so neighbours agree without talking.

    Args:
        shares: each above 0, together at most 1.

    Raises:
        TooFewCoresError: fewer cores than shares.
    """
    assert shares and all(share > 0 for share in shares) and sum(shares) <= 1 + len(shares) * _ROUNDING
    if total < len(shares):
        raise TooFewCoresError(f"{total} core{'s' if total != 1 else ''} for {len(shares)} shares")
    given = max(len(shares), math.floor(total * min(1.0, sum(shares)) + _ROUNDING))
    counts = [max(1, math.floor(total * share + _ROUNDING)) for share in shares]
    while sum(counts) > given:  # small shares were rounded up to one core: the largest pays
        counts[counts.index(max(counts))] -= 1
    lost_most = sorted(range(len(shares)), key=lambda at: (counts[at] - total * shares[at], at))
    for at in lost_most[: given - sum(counts)]:
        counts[at] += 1
    return counts
