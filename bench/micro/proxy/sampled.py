"""Runs a module as a program and samples where its main thread spends its CPU time: `OUT MODULE ARGUMENT…`.

From SIGUSR1 on a timer of the kernel fires per millisecond of CPU time, and Python's handler notes the stack; time in C
counts for the Python that called it. Counts per stack go to OUT as JSON lines when the program ends. Who is who in a
stack is `breakdown.py`'s to say.
"""

from __future__ import annotations

import atexit
import json
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

EVERY_S = 0.001
DEPTH = 40

_counts: Counter[tuple[str, ...]] = Counter()


def _note(_: int, frame: FrameType | None) -> None:
    stack: list[str] = []
    while frame is not None and len(stack) < DEPTH:
        stack.append(frame.f_code.co_filename)
        frame = frame.f_back
    _counts[tuple(stack)] += 1


def _begin(_: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)


def _write(path: Path) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    lines = (json.dumps({"count": count, "stack": stack}) for stack, count in _counts.items())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    out, module, *rest = argv
    atexit.register(_write, Path(out))
    signal.signal(signal.SIGPROF, _note)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.signal(signal.SIGUSR1, _begin)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
