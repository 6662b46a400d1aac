"""The request sender ahead of what it loads, where they share the cores of one host.

A starved sender sends late, and reads tokens later than they came: both look like a slow server. It needs a hundredth
of a core, so what it takes from them by going first is less than what waiting would do to the figures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def realtime_priority(wanted: bool = True) -> Iterator[bool]:
    """The calling thread at the lowest real-time priority, for the time of the context; yields whether it is.

    Only Linux has it, and only for root or with CAP_SYS_NICE: elsewhere nothing changes, and `Rules.late_ms` says
    whether it mattered. What is started meanwhile has it as well, as the threads that sleep until a request is due.
    """
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
        if wanted:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        wanted = False
    try:
        yield wanted
    finally:
        if wanted:
            os.sched_setscheduler(0, policy, param)
