"""The threads of a stage on CPU: as many of OpenMP's as `epd_serve.cpu_threads` says, and those of gloo calmed down.

Neither by its environment: a process in which OpenMP is loaded already, such as one that was forked, reads no variable,
and gloo knows none. A worker has some ten of gloo's process groups (torch.distributed), also where it is the only rank;
each has a thread that waits for its sockets 10 ms at a time, a thousand looks a second in a stage that waits: 2 % of a
core. The kernel may let those waits end late (`PR_SET_TIMERSLACK`); what arrives still ends them at once.
"""

from __future__ import annotations

import json
import os

from epd_serve.cpu_threads import COUNT_ENV, CPU_THREADS_ENV, CpuThreads
from epd_serve.engine.worker_start import around_init_device
from epd_serve.wake import end_waits_late

_LATE_NS = 100_000_000  # for ranks that meet, two dozen times so long at most


def rule_threads() -> None:
    """Install it in a process that may become a worker. Nothing without an order; an operator's own wins."""
    if CPU_THREADS_ENV not in os.environ:
        return
    around_init_device("gloo", before=lambda rank: end_waits_late(_LATE_NS), after=lambda rank: end_waits_late(0))
    if (threads := ordered()) is not None:
        around_init_device("threads", before=lambda rank: _bind(threads))


def leave_cores_to_workers() -> None:
    """In a stage's API server, before it has threads: keep off the workers' cores, if that is the order and others are
    there."""
    threads = ordered()
    if threads is not None and threads.apart and (others := os.sched_getaffinity(0) - set(threads.cores)):
        os.sched_setaffinity(0, others)


def ordered() -> CpuThreads | None:
    """Of a worker of this stage; None where there is no order, or an operator's own."""
    order = os.environ.get(CPU_THREADS_ENV)
    return CpuThreads(**json.loads(order)) if order is not None and COUNT_ENV not in os.environ else None


def _bind(threads: CpuThreads) -> None:
    """On the thread that computes; those of OpenMP inherit its cores when they come to be."""
    import torch

    os.sched_setaffinity(0, threads.cores)
    torch.set_num_threads(threads.count)
