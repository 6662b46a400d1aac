"""`python -m bench.tethered PID SIGNAL PROGRAM ARGUMENTS…`: becomes a program that gets SIGNAL when process PID dies.

So that a measurement which is killed leaves nothing running. The request survives exec, so nothing stays in between.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from epd_serve.lifeline import die_with_parent


def tethered(argv: Sequence[str], by: signal.Signals) -> list[str]:
    """The command that runs `argv` tied to this process. Start it where `bench` can be imported, from the main thread:
    the kernel's parent is a thread."""
    return [sys.executable, "-m", "bench.tethered", str(os.getpid()), by.name, *argv]


def main() -> None:
    parent, by, program, *arguments = sys.argv[1:]
    die_with_parent(int(parent), signal.Signals[by])
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    main()
