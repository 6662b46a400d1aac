"""The load generator: requests in a closed loop (so many at once) or an open one (so many a second), and their times.

An open loop's times count from when a request was due, so that a server that stalls is charged for those that it kept
waiting. Every wait is bounded; a request without a good answer is an error and has no times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.client.connection import Answer
from bench.client.pool import Pool
from bench.statistic import percentile
from bench.workloads.arrivals import Poisson, arrivals_within

LIMIT_S = 60.0
"""How long one request may take."""

Requests = Callable[[int], bytes]
"""The n-th request, ready to be written."""


@dataclass
class Sample:
    """What a run saw. Times in seconds; `first_s` and `whole_s` are of good answers, in the order of their ends.

    Attributes:
        begun_s, ended_s: of `time.perf_counter`. cpu_s: the generator's own CPU time.
        errors: answers that were not good, by a word for each kind.
    """

    begun_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    events: int = 0
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> int:
        return len(self.whole_s)

    def note(self, answer: Answer | None, due: float, *, stream: bool) -> None:
        if answer is None:
            self._count("timeout")
        elif answer.good(stream=stream):
            self.first_s.append(answer.first - due)
            self.whole_s.append(answer.ended - due)
            self.events += answer.events
        else:
            self._count(f"status {answer.status}" if answer.status not in (0, 200) else "broken")

    def _count(self, kind: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1

    def summary(self) -> dict[str, float]:
        """Plain numbers for tables and results. Milliseconds."""
        took_s = max(self.ended_s - self.begun_s, 1e-9)
        done = self.good + sum(self.errors.values())
        found: dict[str, float] = {
            "requests": self.good,
            "errors": sum(self.errors.values()),
            "seconds": round(took_s, 3),
            "rps": round(self.good / took_s, 2),
            "events": self.events,
            "generator_us_per_request": round(self.cpu_s / max(done, 1) * 1e6, 1),
            "generator_cpu": round(self.cpu_s / took_s, 3),
        }
        for name, values in (("first", self.first_s), ("whole", self.whole_s)):
            if values:
                found |= {f"{name}_p{p}_ms": round(percentile(values, p) * 1e3, 4) for p in (50, 90, 99)}
        return found


async def closed_loop(
    url: str, requests: Requests, *, at_once: int, seconds: float, stream: bool, warm_up_s: float = 0.0
) -> Sample:
    """Keep `at_once` requests under way for `seconds`. Those of the first `warm_up_s` are not counted.

    Raises:
        StageError: nobody listens at `url`.
    """
    pool, sample, turn = Pool(url), Sample(), 0
    begun = time.perf_counter()
    counted_from, until = begun + warm_up_s, begun + warm_up_s + seconds

    async def one_after_another() -> None:
        nonlocal turn
        while (now := time.perf_counter()) < until:
            turn += 1
            answer = await pool.ask(requests(turn), LIMIT_S)
            if now >= counted_from and (answer is None or not answer.ended or answer.ended <= until):
                sample.note(answer, now, stream=stream)

    async def start_counting() -> None:
        await asyncio.sleep(warm_up_s)
        sample.cpu_s -= time.process_time()

    async def stop_counting() -> None:
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
        sample.cpu_s += time.process_time()

    try:
        async with asyncio.TaskGroup() as group:
            for work in (start_counting(), stop_counting(), *(one_after_another() for _ in range(at_once))):
                group.create_task(work)
    finally:
        pool.close()
    sample.begun_s, sample.ended_s = counted_from, until
    return sample


async def open_loop(
    url: str, requests: Requests, *, per_second: float, seconds: float, stream: bool, seed: int = 0
) -> Sample:
    """Send requests at random times (a Poisson process drawn from `seed`), whatever becomes of them.

    Raises:
        StageError: nobody listens at `url`.
    """
    pool, sample = Pool(url), Sample()
    due = arrivals_within(Poisson(per_second), seconds, seed)
    cpu, begun = time.process_time(), time.perf_counter()

    async def send(turn: int, at: float) -> None:
        sample.note(await pool.ask(requests(turn), LIMIT_S), at, stream=stream)

    try:
        async with asyncio.TaskGroup() as group:
            for turn, offset in enumerate(due):
                at = begun + offset
                if (wait_s := at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(send(turn, at))
    finally:
        pool.close()
    sample.cpu_s = time.process_time() - cpu
    sample.begun_s, sample.ended_s = begun, time.perf_counter()
    return sample
