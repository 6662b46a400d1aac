"""A process that dies with its parent: the chain launcher → API server → EngineCore → workers leaves no orphan."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(expected_parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies (Linux `prctl(2)`; elsewhere nothing is done).

    Args:
        expected_parent: pid of the parent this process was made for. If it has already gone the process ends at
            once, which closes the race between fork and prctl.
        by: the signal. A process that has to clean up wants another one than the default.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if expected_parent is not None and os.getppid() != expected_parent:
        os.kill(os.getpid(), by)


def adopt_orphans() -> None:
    """Have processes below this one come to it, and not to init, when their parent ends (Linux `prctl(2)`).

    Raises:
        OSError: the kernel knows no such thing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_by(number: signal.Signals) -> None:
    """End this process by a signal, as another one was that it answers for. It leaves no core: the other one has."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if number is not signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # one that ends nobody


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` call this process, its first 15 characters. Arguments and environment stay."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
