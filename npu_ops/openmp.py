"""The OpenMP team of the calling thread: the threads that torch computes with on CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Sequence

import psutil

_PARALLEL_ELEMENTS = 1 << 20  # torch splits an elementwise operation among threads from 32768 elements on
_LOOKS = 2  # a thread that one of the others has begun meanwhile is seen by the second one


@functools.cache
def team() -> tuple[int, ...]:
    """Thread ids in the order of the team. Made here if there is none yet."""
    import torch

    before = _threads()
    torch.empty(_PARALLEL_ELEMENTS).fill_(1.0)
    return (0, *sorted(_threads() - before))


def set_team_size(threads: int) -> None:
    """What OMP_NUM_THREADS does when libgomp is loaded, later, for the teams of the calling thread; it is preloaded.

    `torch.set_num_threads` would make another pool of threads on the way.
    """
    ctypes.CDLL(None).omp_set_num_threads(threads)


def bind_team(cores: Sequence[int]) -> None:
    """Each thread of the team to one of the cores, in turn."""
    for index, thread in enumerate(team()):
        os.sched_setaffinity(thread, {cores[index % len(cores)]})


def move_threads(before: Iterable[int], cores: Iterable[int]) -> set[int]:
    """Every thread of this process that may run on cores of `before` alone may run on `cores` from now on; those that
    float still do. Returns the ids of those that were moved."""
    old, new, moved = set(before), set(cores), set[int]()
    for _ in range(_LOOKS):
        for thread in _threads() - moved:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.sched_getaffinity(thread) <= old:
                    os.sched_setaffinity(thread, new)
                    moved.add(thread)
    return moved


def _threads() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}
