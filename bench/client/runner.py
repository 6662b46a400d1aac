"""Sends requests on a schedule, whatever becomes of them: an open loop at given moments, or a closed one of so many.

Each request ends in exactly one row. A run ends by itself when its last request has; before that by `stop`, when the
endpoint is gone, or when rows cannot be kept: what is under way then is left, and has a row too. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from bench.client.ahead import ahead
from bench.client.connection import Answer, Connection
from bench.client.pool import Pool
from bench.client.row import Outcome, Row
from bench.client.run import Bounds, Run
from bench.client.sse import Reading, read_stream
from bench.client.target import Ask, Target
from bench.client.verdict import CROWDED, UNREACHABLE, Verdict, judge
from epd_serve.errors import EpdError, StageError

Asks = Callable[[int], Ask]
"""The n-th request of a run."""

COARSE_S = 0.003
"""Before a request is due, the loop's timer has to have come."""
LEFT_S = 1.0
"""For the loop to notice that a connection was closed by us."""


class Runner:
    """Sends one run. Use once.

    Args:
        target: of several servers each gets every so many-th request.
        keep: is given each row as it comes, to write it down. An EpdError of it ends the run.
        name: unique among runs; requests are called `NAME-N`, which the endpoint's stamps carry.
        label: of the run in its rows.
    """

    def __init__(
        self,
        target: Target,
        asks: Asks,
        *,
        name: str,
        label: str = "",
        keep: Callable[[Row], None] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.run = Run(label)
        self._target, self._asks, self._name, self._keep = target, asks, name, keep
        self._bounds = bounds or Bounds()
        self._pools = [Pool(server.endpoint) for server in target.servers]
        self._open: set[Connection] = set()
        self._pacing: asyncio.Task[None] | None = None
        self._missed = 0
        self._reached_s = 0.0

    def stop(self, why: str) -> None:
        """Send no more, and leave what is under way. The first reason counts."""
        if self.run.stopped:
            return
        self.run.stopped = why
        if self._pacing is not None:
            self._pacing.cancel()
        for connection in list(self._open):
            connection.close()

    async def open_loop(self, dues: Iterable[float]) -> Run:
        """Send at these seconds from now, ascending."""

        async def pace(group: asyncio.TaskGroup) -> None:
            for n, due in enumerate(dues):
                at = self.run.begun_s + due
                await _until(at)
                if self.run.stopped:
                    return
                self.run.issued_s = at
                group.create_task(self._send(n, at))

        async with self._running() as group:
            self._pacing = group.create_task(pace(group))
        return self.run

    async def closed_loop(self, at_once: int, *, count: int | None = None, seconds: float | None = None) -> Run:
        """Keep so many under way until `count` were sent or `seconds` are over."""
        assert count is not None or seconds is not None, "a closed loop has to end"

        async def one_after_another() -> None:
            while not self.run.stopped and (count is None or self.run.sent < count):
                now = time.perf_counter()
                if seconds is not None and now >= self.run.begun_s + seconds:
                    return
                self.run.issued_s = now
                await self._send(self.run.sent, now)

        async with self._running() as group:
            for _ in range(at_once):
                group.create_task(one_after_another())
        return self.run

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[asyncio.TaskGroup]:
        """The tasks of the run, its clocks and its priority."""
        run = self.run
        cpu_s, run.begun_s = time.process_time(), time.perf_counter()
        run.issued_s = self._reached_s = run.begun_s
        with ahead() as run.goes_first:
            try:
                async with asyncio.TaskGroup() as group:
                    yield group
            finally:
                for pool in self._pools:
                    pool.close()
                run.cpu_s, run.ended_s = time.process_time() - cpu_s, time.perf_counter()

    async def _send(self, n: int, due_s: float) -> None:
        run, ready_s, ask = self.run, time.perf_counter(), self._asks(n)
        run.sent += 1
        answer = Answer()
        if (ended := self._ended()) is not None:
            verdict = ended
        elif run.under_way >= self._bounds.at_once:
            verdict = Verdict(Outcome.ERROR, CROWDED, f"{run.under_way} requests were under way")
        else:
            run.under_way += 1
            try:
                answer, cut = await self._exchange(n, ask)
            finally:
                run.under_way -= 1
            reading = _read(answer)
            verdict = cut or judge(answer, reading, ask.expected_tokens)
            self._watch(answer, verdict)
            self._note(n, due_s, ready_s, ask, answer, reading, verdict)
            return
        self._note(n, due_s, ready_s, ask, answer, Reading(), verdict)

    async def _exchange(self, n: int, ask: Ask) -> tuple[Answer, Verdict | None]:
        """What came back; with a verdict where it is no answer's fault, or none came."""
        turn = n % len(self._pools)
        pool, server = self._pools[turn], self._target.servers[turn]
        try:
            connection = await pool.take()
        except StageError as error:
            return Answer(), Verdict(Outcome.ERROR, UNREACHABLE, error.message)
        if (ended := self._ended()) is not None:
            connection.close()
            return Answer(), ended
        self._open.add(connection)
        leaves_s, limit_s = ask.cancel_after_s, self._bounds.limit_s
        leaves = leaves_s is not None and leaves_s < limit_s
        try:
            waiter = connection.ask(server.head(f"{self._name}-{n}", len(ask.body)), ask.body, keep=True)
            done, _ = await asyncio.wait([waiter], timeout=leaves_s if leaves else limit_s)
            if not done:
                connection.close()
                await asyncio.wait([waiter], timeout=LEFT_S)
        finally:
            self._open.discard(connection)
        answer = waiter.result() if waiter.done() else Answer()
        if not done:
            late = Verdict(Outcome.TIMEOUT, "timeout", f"no whole answer within {limit_s:g} s")
            return answer, Verdict(Outcome.CANCELLED, "left") if leaves else late
        pool.put_back(connection)
        return answer, None if answer.ended else self._ended()

    def _ended(self) -> Verdict | None:
        """On requests that the end of the run cuts short; None while it goes on."""
        return Verdict(Outcome.CANCELLED, "run ended", self.run.stopped) if self.run.stopped else None

    def _watch(self, answer: Answer, verdict: Verdict) -> None:
        """Ends the run when nobody has answered for a while."""
        if answer.status or verdict.outcome in (Outcome.CANCELLED, Outcome.TIMEOUT):
            self._missed, self._reached_s = 0, time.perf_counter()
            return
        self._missed += 1
        for_s = time.perf_counter() - self._reached_s
        if self._missed >= self._bounds.gone_after and for_s >= self._bounds.gone_s:
            self.stop(
                f"the endpoint is gone: {self._missed} requests in a row had no answer, the last: {verdict.error}"
            )

    def _note(
        self, n: int, due_s: float, ready_s: float, ask: Ask, answer: Answer, reading: Reading, verdict: Verdict
    ) -> None:
        headers = answer.kept.headers if answer.kept is not None else {}

        def told(name: bytes) -> str:
            return headers.get(name, b"").decode("latin-1")

        row = Row(
            run=self.run.label,
            n=n,
            id=f"{self._name}-{n}",
            spec=ask.spec,
            due_s=due_s,
            ready_s=ready_s,
            sent_s=answer.sent or None,
            token_s=reading.content_s,
            last_s=reading.last_s,
            ended_s=answer.ended or time.perf_counter(),
            outcome=verdict.outcome,
            fault=verdict.fault,
            error=verdict.error,
            status=answer.status,
            usage_tokens=reading.completion_tokens,
            prompt_tokens=reading.prompt_tokens,
            finish_reason=reading.finish_reason,
            answered_id=told(b"x-epd-request-id") or told(b"x-request-id"),
            path=told(b"x-epd-path"),
            instances=told(b"x-epd-instances"),
            slo_ttft_ms=ask.slo_ttft_ms,
            slo_tpot_ms=ask.slo_tpot_ms,
        )
        self.run.rows.append(row)
        if self._keep is not None:
            try:
                self._keep(row)
            except EpdError as error:
                self._keep = None
                self.stop(error.message)


def _read(answer: Answer) -> Reading:
    """The stream in the answer; nothing where it is none."""
    return read_stream(answer.kept.pieces) if answer.status == 200 and answer.kept is not None else Reading()


async def _until(at_s: float) -> None:
    """Not before `at_s`, and hardly after it.

    An event loop's timers count whole milliseconds. The last few of a wait are slept through by a thread, whose sleep
    is exact to some 0.1 ms; to look at the clock over and over would cost the server its cores.
    """
    if (wait_s := at_s - time.perf_counter() - COARSE_S) > 0:
        await asyncio.sleep(wait_s)
    if (rest_s := at_s - time.perf_counter()) > 0:
        await asyncio.to_thread(time.sleep, rest_s)
