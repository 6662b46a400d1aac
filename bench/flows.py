"""Requests of several kinds on one clock, each with what became of it: what the scenarios of `epd-bench proxy` send.

`bench/load.py` counts one kind of request as cheaply as it can; here every single one is kept with its times, its
verdict and the end of its answer, and clients may leave. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.client.connection import Answer, post
from bench.client.pool import Pool
from bench.load import LIMIT_S
from epd_serve.errors import StageError

PATH = "/v1/chat/completions"
LEFT_S = 1.0
"""For the loop to notice that a connection was closed by us."""

SAID_BYTES = 400

GOOD, LEFT, TIMEOUT, BROKEN, CUT, UNREACHABLE = "good", "left", "timeout", "broken", "cut", "unreachable"
"""Verdicts; others are `status N`. LEFT: the client left, as it was meant to. CUT: a stream that had begun ended with
an error event and without [DONE]. BROKEN: it ended without a word."""


@dataclass(frozen=True)
class Flow:
    """Requests of one kind: at moments given beforehand (`dues`), or `count` of them, so many `at_once`.

    Attributes:
        bodies: sent in turn. dues: seconds from the start of the run.
        leave_share: of the clients that leave, each after a random time within `leave_within_s`.
    """

    kind: str
    bodies: Sequence[Mapping[str, Any]]
    dues: Sequence[float] = ()
    at_once: int = 0
    count: int = 0
    leave_share: float = 0.0
    leave_within_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """One request. Times in seconds from the start of the run.

    Attributes:
        due: when it was to be sent. first: first byte of the answer's body, 0 where none came. ended: its end.
        said: the end of a bad answer.
    """

    kind: str
    due: float
    first: float
    ended: float
    verdict: str
    said: str = ""

    @property
    def first_s(self) -> float:
        """From when it was due to its first byte; LIMIT_S where no good answer came, which is no flattery."""
        return self.first - self.due if self.verdict == GOOD else LIMIT_S

    @property
    def whole_s(self) -> float:
        return self.ended - self.due

    @property
    def begun(self) -> bool:
        """The client had something of its answer."""
        return self.first > 0


@dataclass
class Run:
    """What a run saw. `begun_s`: its start on `time.perf_counter`, which processes of one machine share."""

    begun_s: float
    outcomes: list[Outcome] = field(default_factory=list)


async def run_flows(url: str, flows: Sequence[Flow], limit_s: float = LIMIT_S) -> Run:
    """Send all flows together, and wait until every request has ended.

    Args:
        limit_s: how long one request may take.
    """
    run, pool = Run(time.perf_counter()), Pool(url)
    try:
        async with asyncio.TaskGroup() as group:
            for flow in flows:
                sender = _Sender(flow, url, pool, run, limit_s)
                group.create_task(sender.at_moments(group) if flow.dues else sender.in_turn(group))
    finally:
        pool.close()
    return run


class _Sender:
    """Sends one flow."""

    def __init__(self, flow: Flow, url: str, pool: Pool, run: Run, limit_s: float) -> None:
        self._flow, self._pool, self._run, self._limit_s = flow, pool, run, limit_s
        self._made = [post(url, PATH, json.dumps(body).encode()) for body in flow.bodies]
        self._stream = [bool(body.get("stream")) for body in flow.bodies]
        self._chance = random.Random(f"{flow.kind}/{flow.seed}")
        self._next = 0

    async def at_moments(self, group: asyncio.TaskGroup) -> None:
        for due in self._flow.dues:
            if (wait_s := self._run.begun_s + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(self._send(due))

    async def in_turn(self, group: asyncio.TaskGroup) -> None:
        for _ in range(self._flow.at_once):
            group.create_task(self._one_after_another())

    async def _one_after_another(self) -> None:
        while self._next < self._flow.count:
            await self._send(time.perf_counter() - self._run.begun_s)

    async def _send(self, due: float) -> None:
        at, self._next = self._next % len(self._made), self._next + 1
        leaves = self._chance.random() < self._flow.leave_share
        limit_s = self._chance.uniform(0.0, self._flow.leave_within_s) if leaves else self._limit_s
        try:
            connection = await self._pool.take()
        except StageError as error:
            self._note(due, Answer(), UNREACHABLE, error.message)
            return
        waiter = connection.ask(self._made[at])
        done, _ = await asyncio.wait([waiter], timeout=limit_s)
        if done:
            self._pool.put_back(connection)
            answer = waiter.result()
            self._note(due, answer, verdict(answer, stream=self._stream[at]))
            return
        connection.close()
        await asyncio.wait([waiter], timeout=LEFT_S)
        self._note(due, waiter.result() if waiter.done() else Answer(), LEFT if leaves else TIMEOUT)

    def _note(self, due: float, answer: Answer, found: str, said: str = "") -> None:
        begun = self._run.begun_s
        self._run.outcomes.append(
            Outcome(
                self._flow.kind,
                due,
                answer.first - begun if answer.first else 0.0,
                (answer.ended or time.perf_counter()) - begun,
                found,
                said if said or found in (GOOD, LEFT) else answer.tail[-SAID_BYTES:].decode(errors="replace"),
            )
        )


def verdict(answer: Answer, *, stream: bool) -> str:
    """What an answer was, in a word (see `GOOD` and those beside it)."""
    if answer.good(stream=stream):
        return GOOD
    if answer.status not in (0, 200):
        return f"status {answer.status}"
    return CUT if stream and b'"error"' in answer.tail and b"[DONE]" not in answer.tail else BROKEN
