"""Gives a worker on CPU its OpenMP threads (`epd_serve.cpu_threads`) when it initialises its device.

Not by its environment: a process in which OpenMP is loaded already, such as one that was forked, reads no variable.
"""

from __future__ import annotations

import json
import os

from epd_serve.cpu_threads import BIND_ENV, COUNT_ENV, CPU_THREADS_ENV, NOT_BY_VLLM, CpuThreads
from epd_serve.engine.worker_start import around_init_device


def bind_threads() -> None:
    """Install it in a process that may become a worker. Nothing without an order, or against an operator's."""
    order = os.environ.get(CPU_THREADS_ENV)
    if order is not None and os.environ.get(BIND_ENV) == NOT_BY_VLLM and COUNT_ENV not in os.environ:
        threads = CpuThreads(**json.loads(order))
        around_init_device("threads", before=lambda rank: _bind(threads))


def _bind(threads: CpuThreads) -> None:
    """On the thread that computes; those of OpenMP inherit its cores when they come to be."""
    import torch

    os.sched_setaffinity(0, threads.cores)
    torch.set_num_threads(threads.count)
