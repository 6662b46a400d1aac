"""Which CPU cores a virtual device is. Only the OpenMP workers of its stages are pinned there; servers float."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CoreSets:
    """Core ids per virtual device; `oversubscribed` when devices have to share cores."""

    sets: tuple[tuple[int, ...], ...]
    oversubscribed: bool

    def of(self, devices: Iterable[int]) -> tuple[int, ...]:
        """Cores of the given virtual devices together, ascending, each once."""
        return tuple(sorted({core for device in devices for core in self.sets[device]}))


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
        return CoreSets(tuple((usable[device % len(usable)],) for device in range(devices)), oversubscribed=True)
    bounds = [len(usable) * device // devices for device in range(devices + 1)]
    return CoreSets(tuple(tuple(usable[start:end]) for start, end in itertools.pairwise(bounds)), oversubscribed=False)
