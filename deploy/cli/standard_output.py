"""Standard output whose reader may leave first: `epd-serve layout '(E-P)-D' | head -1` ends as `cat` would."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

STDOUT = 1
READER_LEFT = 128 + signal.SIGPIPE
"""What a shell says of a program that wrote to nobody."""


def until_the_reader_leaves(command: Callable[[], int]) -> int:
    """Carries out a command that prints.

    Returns:
        Its exit code, or `READER_LEFT` as soon as it prints and nobody reads any more, without a word.

    Raises:
        BrokenPipeError: another connection than standard output broke.
    """
    try:
        try:
            return command()
        finally:
            print(end="", flush=True)  # here, not at the interpreter's end, where nobody could catch what it raises
    except BrokenPipeError:
        if not _is_read_by_nobody():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # takes what the buffer still holds
        return READER_LEFT


def _is_read_by_nobody() -> bool:
    polled = select.poll()
    polled.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in polled.poll(0))
