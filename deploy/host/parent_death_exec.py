"""`python -m … PID SIGNAL PROGRAM ARGUMENTS…`: becomes a program that gets SIGNAL when PID dies.

For programs that are not ours, and for what a measurement starts; stages ask the kernel for it themselves
(`epd_serve.engine.stage_main`). The request survives exec, so nothing stays in between.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from epd_serve.lifeline import die_with_parent


def parent_death_exec(argv: Sequence[str], by: signal.Signals = signal.SIGKILL) -> tuple[str, ...]:
    """Returns what follows `python -m`, for `argv` to get the signal `by` when its parent dies: this process.

    To be started where `deploy` can be imported, and from the main thread: the kernel's parent is a thread.
    """
    return ("deploy.host.parent_death_exec", str(os.getpid()), by.name, *argv)


def main() -> None:
    parent, by, program, *arguments = sys.argv[1:]
    die_with_parent(int(parent), signal.Signals[by])
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    main()
