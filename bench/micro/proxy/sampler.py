"""Where a process spends its CPU time: a stack every `EVERY_S` seconds of it, counted by module.

`begin` in a process that Python starts (`cost.py` has it called before the program), which writes what it counted when
it ends. CPU time that C spends between two lines of Python counts for the line after it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S = 0.002


def begin(program: str, folder: str) -> None:
    """Sample this process if it runs the module `program`. Writes `folder`/<pid>.json at its end: for each sample its
    modules from the outermost, joined by spaces, and how many were like it."""
    if program not in sys.orig_argv:
        return
    counted: Counter[str] = Counter()

    def sample(_: int, frame: FrameType | None) -> None:
        modules: list[str] = []
        while frame is not None:
            modules.append(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        counted[" ".join(reversed(modules))] += 1

    def write() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(counted), encoding="utf-8")

    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    atexit.register(write)
