"""Courses of transfers between fake devices, chosen so that a rule that was left out shows. For the tests here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.epd_serve.engine.kv.device_ends import Pair, Setting
from tests.epd_serve.engine.kv.slow_devices import Prompt

Course = Callable[[Pair], list[str]]


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
    """A prompt is preempted, and its blocks given away at once, while the transport reads them."""
    a, b = Prompt.make("a", [3, 2, 1], [7, 8, 9]), Prompt.make("b", [3], [4])
    pair.expect(a, b)
    pair.hang_in(a)
    pair.step(b.chunk(), preempted=["a"])
    pair.p_device.fence()()
    waited = [] if pair.is_writing() else ["the model's thread waited for a write"]
    pair.network.gate.set()
    pair.run()
    return waited + pair.wrong(b, maybe=[a])


def send_again_what_is_read(pair: Pair) -> list[str]:
    """As before, but the prompt was not complete, and is computed again in other blocks before that write has ended."""
    a, b = Prompt.make("a", [3, 2, 1], [7, 8, 9]), Prompt.make("b", [3], [4])
    again = Prompt("a", (12, 13, 14), a.dst, a.kv)
    pair.expect(a, b)
    pair.hang_in(a, blocks=2)
    pair.step(b.chunk(), preempted=["a"])
    pair.step(again.chunk())
    pair.p_device.fence()()
    pair.take_up()
    pair.network.gate.set()
    pair.run()
    return pair.wrong(again, b)
