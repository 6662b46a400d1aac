"""Courses of transfers between fake devices, chosen so that a rule that was left out shows. For the tests here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType

from epd_serve.engine.kv.link_jobs import Outgoing
from tests.epd_serve.engine.kv.device_ends import Pair, Setting
from tests.epd_serve.engine.kv.slow_devices import STUCK_S, Prompt
from tests.waiting import wait_for

Course = Callable[[Pair], list[str]]

_INVALIDATE = Outgoing.invalidate.__code__


def follow(folder: Path, course: Course, setting: Setting) -> list[str]:
    """What goes wrong in this course."""
    pair = Pair(folder, setting)
    try:
        if pair.open().state != "up":
            return [pair.link().reason, *pair.p_device.broken, *pair.d_device.broken]
        return course(pair)
    finally:
        pair.close()


def two_steps(pair: Pair) -> list[str]:
    """Two prompts, one in two chunks. D copies nothing before P has done all that it can without."""
    a, b = Prompt.make("a", [3, 2, 1, 15, 0], [7, 8, 9, 1, 2]), Prompt.make("b", [6, 10], [0, 15])
    pair.expect(a, b)
    pair.step(a.chunk(0, 2))
    pair.step(a.chunk(2), b.chunk())
    pair.run(hold_d_until=lambda: pair.over_at_p() or pair.waits_for_room())
    return pair.wrong(a, b)


def preempt_unread(pair: Pair) -> list[str]:
    """A prompt is computed, then preempted and its blocks given away, before the link gets to it."""
    earlier, a, b = Prompt.make("e", [9], [15]), Prompt.make("a", [3, 2, 1], [7, 8, 9]), Prompt.make("b", [3], [4])
    pair.expect(earlier, a, b)
    pair.hang_in(earlier)
    pair.step(a.chunk())
    pair.step(b.chunk(), preempted=["a"])
    pair.p_device.fence()()
    pair.network.gate.set()
    pair.run()
    return pair.wrong(earlier, b, maybe=[a])


def preempt_while_read(pair: Pair) -> list[str]:
    """A prompt is preempted while the transport reads its blocks: they may be given away only afterwards."""
    a, b = Prompt.make("a", [3, 2, 1], [7, 8, 9]), Prompt.make("b", [3], [4])
    pair.expect(a, b)
    pair.hang_in(a)
    overwritten = threading.Event()

    def next_step() -> None:
        pair.p_device.enter_thread()
        pair.step(b.chunk(), preempted=["a"])
        pair.p_device.fence()()
        overwritten.set()

    thread = threading.Thread(target=next_step)
    thread.start()
    wait_for(lambda: overwritten.is_set() or _is_in(thread, _INVALIDATE))
    pair.network.gate.set()
    thread.join(STUCK_S)
    pair.run()
    return pair.wrong(b, maybe=[a])


def _is_in(thread: threading.Thread, code: CodeType) -> bool:
    """Whether the thread is executing this function, or waits in it."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
