"""How much of /dev/shm a launch takes. Containers often have 64 MiB there, and writing beyond it is SIGBUS."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epd_serve.errors import ConfigError
from epd_serve.placement import InstancePlan

RESERVE_MIB = 32
"""Left for vLLM's own message queues."""


@dataclass(frozen=True)
class SharedMemory:
    """MiB of /dev/shm: the arena, and the staging buffer of each KV link (sending worker and receiver)."""

    arena_mib: int
    staging_mib: int


SMALLEST = SharedMemory(arena_mib=8, staging_mib=4)

_PART_PER_ENCODER, _LARGEST_PART = 64, 8
LEAST_ARENA_MIB, _MOST_MIB = 256, 8192
"""Where nobody gave a size. More than the latter takes seconds to allocate at the start, and each process that
maps it the page tables of it all."""


def usual_arena_mib(host_bytes: int, encoders: int, free: int | None = None) -> int:
    """The size of an arena where none was asked for: a 64th of the host's memory per encoder, at most an eighth of it
    and half of `/dev/shm`; 256 MiB to 8 GiB. Where not even that much is free, `fit_shared_memory` goes below it.

    Args:
        host_bytes: memory of the host, or of its container.
        encoders: instances that put features there.
        free: MiB that `/dev/shm` has left; None where that is another machine's.
    """
    host_mib = host_bytes >> 20
    most = min(host_mib // _LARGEST_PART, _MOST_MIB if free is None else min(_MOST_MIB, free // 2))
    return max(LEAST_ARENA_MIB, min(encoders * host_mib // _PART_PER_ENCODER, most))


def free_mib(path: Path) -> int:
    """MiB that can still be written below `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize >> 20


def fit_shared_memory(
    wanted: SharedMemory, plans: Sequence[InstancePlan], *, features_travel: bool, free: int
) -> SharedMemory:
    """The wanted sizes, or both scaled down until they fit into `free` MiB.

    Raises:
        ConfigError: not even the smallest fit.
    """

    def needed(memory: SharedMemory) -> int:
        return wanted_mib(memory, plans, features_travel=features_travel)

    memory = wanted
    while needed(memory) and needed(memory) + RESERVE_MIB > free:
        if memory == SMALLEST:
            raise ConfigError(
                f"/dev/shm has {free} MiB free, {needed(memory) + RESERVE_MIB} MiB are needed; "
                "enlarge it (docker run --shm-size=1g) or remove old files there"
            )
        memory = SharedMemory(
            arena_mib=max(SMALLEST.arena_mib, memory.arena_mib // 2),
            staging_mib=max(SMALLEST.staging_mib, memory.staging_mib // 2),
        )
    return memory


def wanted_mib(memory: SharedMemory, plans: Sequence[InstancePlan], *, features_travel: bool) -> int:
    """MiB that arena and staging of all links take together."""
    links = sum(
        kv_links(sender.tp, receiver.tp)
        for sender in plans
        for receiver in plans
        if sender.sends_kv and receiver.takes_kv and sender is not receiver
    )
    return (memory.arena_mib if features_travel else 0) + memory.staging_mib * links


def kv_links(senders: int, receivers: int) -> int:
    """At most so many pairs of workers share heads when a sender with so many ranks meets such a receiver."""
    return senders + receivers - math.gcd(senders, receivers)
