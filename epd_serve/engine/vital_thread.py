"""Threads that a stage cannot do without: when one fails or hangs, the stage ends with one error, and is started again.

A thread that hangs in a device's or a transport's native code can be neither ended nor replaced. Its call may return at
any time and go on reading memory of this process, or writing one-sidedly to a peer's, so none of that memory may be
given to others while the process lives. Its end stops those accesses; peers notice it, and free what they held for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from npu_ops.fences import DEADLINE_S

logger = logging.getLogger(__name__)

HUNG_S = 1.5 * DEADLINE_S
"""How long a thread may do one thing. Longer than the longest wait that has a deadline of its own."""

_STALL_S = 2.0  # looks come about once a second: the rest of a longer gap is one in which this process did not run


def end_stage(reason: str) -> None:
    """Ends this process at once. vLLM ends the stage of which it was part."""
    logger.critical("this stage ends: %s", reason)
    sys.stderr.flush()
    os._exit(1)  # not by an exception in another thread: that one may hang as well


class VitalThread(threading.Thread):
    """Ends the stage when its work raises, or when it does not `beat` for `HUNG_S` while another thread looks."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._beats = self._seen = 0
        self._silent_s = 0.0
        self._looked_at = time.monotonic()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whatever it is, nobody would do this thread's work
            if not threading.main_thread().is_alive():
                return  # the process is ending
            logger.exception("thread %s", self.name)
            end_stage(f"thread {self.name} failed: {type(error).__name__}: {error}")

    def beat(self) -> None:
        """This thread has got on."""
        self._beats += 1

    def look(self) -> None:
        """To be called about once a second, by one other thread. It ends the stage where this thread hangs."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _STALL_S), now
        if self._beats != self._seen:
            self._seen, self._silent_s = self._beats, 0.0
        elif self.is_alive():
            self._silent_s += passed_s
            if self._silent_s > HUNG_S:
                frame = sys._current_frames().get(self.ident or 0)
                where = "".join(traceback.format_stack(frame)) if frame is not None else ""
                end_stage(f"thread {self.name} has hung for {self._silent_s:.0f} s in\n{where}")
