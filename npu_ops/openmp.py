"""The OpenMP team of the calling thread: the threads that torch computes with on CPU."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

import psutil

_PARALLEL_ELEMENTS = 1 << 20  # torch splits an elementwise operation among threads from 32768 elements on


@functools.cache
def team() -> tuple[int, ...]:
    """Thread ids in the order of the team. Made here if there is none yet."""
    import torch

    before = _threads()
    torch.empty(_PARALLEL_ELEMENTS).fill_(1.0)
    return (0, *sorted(_threads() - before))


def set_team_size(threads: int) -> None:
    """What OMP_NUM_THREADS does when libgomp is loaded, later; it is preloaded. Nothing has been computed yet.

    `torch.set_num_threads` would make another pool of threads on the way.
    """
    ctypes.CDLL(None).omp_set_num_threads(threads)


def bind_team(cores: Sequence[int]) -> None:
    """Each thread of the team to one of the cores, in turn."""
    for index, thread in enumerate(team()):
        os.sched_setaffinity(thread, {cores[index % len(cores)]})


def _threads() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}
