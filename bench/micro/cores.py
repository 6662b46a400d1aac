"""The cores that a measurement runs on: how fast each is just now, and fewer of them for what it starts.

A core of a virtual machine is often one of two threads of a physical core. While another machine uses the other thread,
it computes at some 0.55 of its speed, for seconds or minutes, each core apart; /proc shows nothing of that, steal time
neither. Two servers that are measured minutes apart then differ by more than what is to be shown.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.micro.measurement import Row
from bench.micro.rows import grouped, ratios
from bench.statistic import Spread

LOOPS, TRIES = 20_000, 4
ALIKE = 1.3
"""By at most so much do readings of cores at one speed differ; full speed and shared differ by 1.8."""
EVEN_ROUNDS = 5
"""With fewer rounds on cores of one speed, all rounds count."""


def core_us() -> list[float]:
    """Of each core of this thread: microseconds per thousand rounds of a fixed loop, the best of some tries."""
    own = os.sched_getaffinity(0)
    try:
        return [_loop_us(core) for core in sorted(own)]
    finally:
        os.sched_setaffinity(0, own)


def alike(readings: Iterable[float]) -> bool:
    """Whether all cores were at one speed in all of these readings."""
    known = list(readings)
    return max(known) <= ALIKE * min(known)


def ratios_at_one_speed(of: Sequence[Row], over: Sequence[Row], name: str) -> Spread | None:
    """`ratios` by round, of rows with what `core_us` was before and after each. Where there are `EVEN_ROUNDS` in which
    all cores were at one speed throughout both, of those rounds alone."""
    theirs = {number: own for (number,), own in grouped(over, "round").items()}
    pairs = [(row, *theirs[row["round"]]) for row in of if row["round"] in theirs]
    even = [pair[0] for pair in pairs if alike(us for one in pair for us in one["core_us"])]
    enough = len({row["round"] for row in even}) >= EVEN_ROUNDS
    return ratios(even if enough else of, over, name)


@contextlib.contextmanager
def kept_apart(alone: Iterable[int], others: Iterable[int]) -> Iterator[None]:
    """Pins the processes `alone` to the cores that a thread of theirs is pinned to already, the one that computes, and
    `others` to the rest. What they start later stays there. So does the calling thread, until the end of the context.
    """
    before, ours = os.sched_getaffinity(0), [thread for pid in alone for thread in _threads(pid)]
    cores = min(map(os.sched_getaffinity, ours), key=len)
    rest = before - cores or cores
    for threads, where in ((ours, cores), ([0, *(thread for pid in others for thread in _threads(pid))], rest)):
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, where)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _threads(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def _loop_us(core: int) -> float:
    os.sched_setaffinity(0, {core})
    took_s = []
    for _ in range(TRIES):
        begun, total = time.perf_counter(), 0
        for number in range(LOOPS):
            total += number & 3
        took_s.append(time.perf_counter() - begun)
    return round(min(took_s) * 1e9 / LOOPS, 2)
