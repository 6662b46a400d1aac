"""Run by its path as `python -I -S spawned.py ROOT CHANNEL PROGRAM ARGUMENTS…`: becomes a program that is ROOT's child.

Whoever has started it may end without ending the program: a fork of it is orphaned at once, so that it comes to ROOT,
the nearest process above that takes in orphans, and dies with that one. On CHANNEL, an inherited socket, it says its
pid and waits for `GO`: until then it has done nothing, and without that word it ends. Standard library alone: it is
loaded once for each process that is started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import time

PID = struct.Struct("=i")
GO = b"go\n"
ORPHANED_S = 10.0
NOT_BEGUN, NOT_FOUND = 71, 127
"""Exit codes: it was never told to go; the program cannot be executed."""

_PR_SET_PDEATHSIG = 1


def main() -> int:
    root, channel, program, *arguments = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    if os.fork():
        os._exit(0)
    deadline = time.monotonic() + ORPHANED_S
    while os.getppid() != root:
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.001)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != root:
        return 1
    os.write(channel, PID.pack(os.getpid()))
    if os.read(channel, len(GO)) != GO:
        return NOT_BEGUN
    os.close(channel)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and by what it executes if not reset
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        print(f"{program}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND


if __name__ == "__main__":
    os._exit(main())
