"""The one request sender: open loops at given moments and closed loops of so many, whatever becomes of them.

Each request ends in exactly one record. A run ends by itself when its last request has; before that by `stop`, when the
endpoint is gone, or when records cannot be kept: what is under way then is left, and has a record too. Every wait is
bounded. Latencies count from when a request was *due*, so a server that stalls is charged for what it kept waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.clients.answers import CROWDED, UNREACHABLE, Reading, ResponseStatus, judge, read_answer
from bench.clients.http import Connection, Pool, Response
from bench.clients.results import Outcome, RequestRecord
from bench.clients.target import Request, Target
from bench.workloads.distributions import seeded_rng
from deploy.host import event_loop
from epd_serve.errors import ConfigError, EpdError, StageError

COARSE_S = 0.003
"""Before a request is due, the loop's timer has to have come."""
LEFT_S = 1.0
"""For the loop to notice that a connection was closed by us."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What keeps a run finite.

    Attributes:
        limit_s: how long one request may take.
        concurrency: requests under way; one more is not sent, and that is its error.
        gone_after: so many in a row that could not reach the endpoint, over `gone_s` or longer, end the run.
    """

    limit_s: float = 600.0
    concurrency: int = 4096
    gone_after: int = 20
    gone_s: float = 5.0


@dataclass(frozen=True)
class Flow:
    """Requests of one kind, and when they are sent: an open loop where there are `dues`, else a closed loop.

    Attributes:
        requests: sent in turn, over and over. kind: names the flow in its records.
        dues: seconds from the start of the run, ascending.
        concurrency: of a closed loop: requests under way, until `count` were sent or `duration_s` are over.
        leave_share: of the clients that leave, each within `leave_within_s` of sending, drawn from `seed`.
    """

    requests: Sequence[Request]
    kind: str = ""
    dues: Sequence[float] | None = None
    concurrency: int = 0
    count: int | None = None
    duration_s: float | None = None
    leave_share: float = 0.0
    leave_within_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError(f"the flow {self.kind!r} has no request to send", param="requests")
        if self.dues is None and (self.concurrency < 1 or self.count is self.duration_s is None):
            raise ConfigError("a closed loop needs a concurrency, and a count or a duration_s to end", param="dues")

    def request(self, n: int) -> Request:
        """The n-th request, with the moment at which its client leaves."""
        request = self.requests[n % len(self.requests)]
        if not self.leave_share:
            return request
        leave, moment = seeded_rng("leave", self.kind, self.seed, n).random(2)
        return replace(request, cancel_after_s=moment * self.leave_within_s) if leave < self.leave_share else request


@dataclass
class Run:
    """A run so far, and in the end.

    Attributes:
        begun_s: its start (CLOCK_MONOTONIC). issued_s: when the last request was due. ended_s: when the last ended.
        rows: records in the order in which requests ended. cpu_s: the sender's own CPU time.
        under_way: requests now. stopped: why it ended early; "" where it did not. goes_first: `realtime_priority`.
    """

    label: str
    begun_s: float = 0.0
    issued_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    sent: int = 0
    under_way: int = 0
    stopped: str = ""
    goes_first: bool = False
    rows: list[RequestRecord] = field(default_factory=list)


class Sender:
    """Sends one run. Use once.

    Args:
        target: or its URL; of several servers each gets every so many-th request.
        name: unique among runs; requests are called `NAME-N`, which the endpoint's stamps carry.
        label: of the run in its records.
        keep: is given each record as it comes, to write it down. An EpdError of it ends the run.
        decode: False keeps of each answer its first byte, its end and its outcome alone, which costs a fraction.
        realtime: asks for `realtime_priority`.

    Attributes:
        result: the run so far.
    """

    def __init__(
        self,
        target: Target | str,
        *,
        name: str = "",
        label: str = "",
        keep: Callable[[RequestRecord], None] | None = None,
        bounds: Bounds | None = None,
        decode: bool = True,
        keep_text: bool = False,
        realtime: bool = True,
    ) -> None:
        self.result = Run(label)
        self._target = Target(target) if isinstance(target, str) else target
        self._name, self._keep, self._bounds = name or secrets.token_hex(6), keep, bounds or Bounds()
        self._decode, self._keep_text, self._realtime = decode, keep_text, realtime
        self._pools = [Pool(server.endpoint) for server in self._target.servers]
        self._open: set[Connection] = set()
        self._pacing: list[asyncio.Task[None]] = []
        self._missed, self._reached_s = 0, 0.0

    def stop(self, why: str) -> None:
        """Send no more, and leave what is under way. The first reason counts."""
        if self.result.stopped:
            return
        self.enough(why)
        for connection in list(self._open):
            connection.close()

    def enough(self, why: str) -> None:
        """Send no more, also where the next request is due in an hour; what is under way is answered."""
        self.result.stopped = why
        for task in self._pacing:
            task.cancel()

    async def run(self, *flows: Flow) -> Run:
        """Send all flows together; returns when every request has ended."""
        run = self.result
        cpu_s, run.begun_s = time.process_time(), time.perf_counter()
        run.issued_s = self._reached_s = run.begun_s
        with realtime_priority(self._realtime) as run.goes_first:
            try:
                async with asyncio.TaskGroup() as group:
                    for flow in flows:
                        if flow.dues is not None:
                            self._pacing.append(group.create_task(self._open_loop(flow, flow.dues, group)))
                            continue
                        numbers = iter(itertools.count() if flow.count is None else range(flow.count))
                        for _ in range(flow.concurrency):
                            group.create_task(self._closed_loop(flow, numbers))
            finally:
                for pool in self._pools:
                    pool.close()
                run.cpu_s, run.ended_s = time.process_time() - cpu_s, time.perf_counter()
        return run

    async def _open_loop(self, flow: Flow, dues: Sequence[float], group: asyncio.TaskGroup) -> None:
        for n, due in enumerate(dues):
            due_s = self.result.begun_s + due
            await _until(due_s)
            if self.result.stopped:
                return
            self.result.issued_s = due_s
            group.create_task(self._send(flow, n, due_s))

    async def _closed_loop(self, flow: Flow, numbers: Iterator[int]) -> None:
        over_s = self.result.begun_s + (float("inf") if flow.duration_s is None else flow.duration_s)
        while not self.result.stopped and (now := time.perf_counter()) < over_s:
            if (n := next(numbers, None)) is None:
                return
            self.result.issued_s = now
            await self._send(flow, n, now)

    async def _send(self, flow: Flow, n: int, due_s: float) -> None:
        run, ready_s, request = self.result, time.perf_counter(), flow.request(n)
        run.sent += 1
        name = "-".join(filter(None, (self._name, flow.kind, str(n))))
        response, reading, status = Response(), Reading(), self._ended()
        if status is None and run.under_way >= self._bounds.concurrency:
            status = ResponseStatus(Outcome.ERROR, CROWDED, f"{run.under_way} requests were under way")
        elif status is None:
            run.under_way += 1
            try:
                response, status = await self._exchange(n, name, request)
            finally:
                run.under_way -= 1
            if response.status == 200 and response.pieces is not None:
                reading = read_answer(response.pieces, stream=request.stream)
            if status is None:
                status = judge(response, reading if self._decode else None, request.stream, request.expected_tokens)
            self._watch(response, status)
        headers = {name: value.decode("latin-1") for name, value in response.headers.items()}
        record = RequestRecord(
            run=run.label,
            n=n,
            id=name,
            spec=request.spec,
            due_s=due_s,
            ready_s=ready_s,
            sent_s=response.sent_s or None,
            first_byte_s=response.first_byte_s or None,
            token_s=reading.content_s,
            last_s=reading.last_s,
            ended_s=response.ended_s or time.perf_counter(),
            outcome=status.outcome,
            fault=status.fault,
            error=status.error,
            status=response.status,
            usage_tokens=reading.completion_tokens,
            prompt_tokens=reading.prompt_tokens,
            finish_reason=reading.finish_reason,
            answered_id=headers.get(b"x-epd-request-id") or headers.get(b"x-request-id", ""),
            path=headers.get(b"x-epd-path", ""),
            instances=headers.get(b"x-epd-instances", ""),
            kind=flow.kind,
            text=reading.text if self._keep_text else "",
        )
        run.rows.append(record)
        if self._keep is not None:
            try:
                self._keep(record)
            except EpdError as error:
                self._keep = None
                self.stop(error.message)

    async def _exchange(self, n: int, name: str, request: Request) -> tuple[Response, ResponseStatus | None]:
        """What came back; with a status where it is no answer's fault, or none came."""
        turn = n % len(self._pools)
        pool, server = self._pools[turn], self._target.servers[turn]
        try:
            connection = await pool.take()
        except StageError as error:
            return Response(), ResponseStatus(Outcome.ERROR, UNREACHABLE, error.message)
        if (ended := self._ended()) is not None:
            connection.close()
            return Response(), ended
        self._open.add(connection)
        leaves_s, limit_s = request.cancel_after_s, self._bounds.limit_s
        leaves = leaves_s is not None and leaves_s < limit_s
        try:
            waiter = connection.send(
                server.head(name, len(request.body), request.headers), request.body, keep=self._decode
            )
            done, _ = await asyncio.wait([waiter], timeout=leaves_s if leaves else limit_s)
            if not done:
                connection.close()
                await asyncio.wait([waiter], timeout=LEFT_S)
        finally:
            self._open.discard(connection)
        response = waiter.result() if waiter.done() else Response()
        if not done:
            late = ResponseStatus(Outcome.TIMEOUT, "timeout", f"no whole answer within {limit_s:g} s")
            return response, ResponseStatus(Outcome.CANCELLED, "left") if leaves else late
        pool.put_back(connection)
        return response, None if response.ended_s else self._ended()

    def _ended(self) -> ResponseStatus | None:
        """The status of requests that the end of the run cuts short; None while it goes on."""
        stopped = self.result.stopped
        return ResponseStatus(Outcome.CANCELLED, "run ended", stopped) if stopped else None

    def _watch(self, response: Response, status: ResponseStatus) -> None:
        """Ends the run when nobody has answered for a while."""
        if response.status or status.outcome in (Outcome.CANCELLED, Outcome.TIMEOUT):
            self._missed, self._reached_s = 0, time.perf_counter()
            return
        self._missed += 1
        for_s = time.perf_counter() - self._reached_s
        if self._missed >= self._bounds.gone_after and for_s >= self._bounds.gone_s:
            self.stop(f"the endpoint is gone: {self._missed} requests in a row had no answer, the last: {status.error}")


def send(target: Target | str, *flows: Flow, **options: Any) -> Run:
    """Send flows from this process, in an event loop of its own. `options`: of `Sender`."""
    return event_loop.run(Sender(target, **options).run(*flows))


def ask(target: Target | str, body: Mapping[str, Any], limit_s: float = 120.0) -> RequestRecord:
    """`answered`, in an event loop of its own."""
    return event_loop.run(answered(target, body, limit_s))


async def answered(target: Target | str, body: Mapping[str, Any], limit_s: float = 120.0) -> RequestRecord:
    """Send one request; returns its record with the text of its answer. Many may be under way in one event loop, so it
    leaves the thread's priority alone: the last one to end would give back what another had taken.

    Raises:
        StageError: nobody is there, or the answer is not whole.
    """
    sender = Sender(target, bounds=Bounds(limit_s), keep_text=True, realtime=False)
    (record,) = (await sender.run(Flow([Request.of(body)], dues=[0.0]))).rows
    if not record.ok:
        where = target if isinstance(target, str) else str(target.endpoint)
        raise StageError(f"{where} gives no whole answer: {record.fault}: {record.error}", stage=where)
    return record


@contextlib.contextmanager
def realtime_priority(wanted: bool = True) -> Iterator[bool]:
    """The calling thread at the lowest real-time priority, for the time of the context; yields whether it is.

    A starved sender sends late, and reads tokens later than they came: both look like a slow server. It needs a
    hundredth of a core, so what it takes by going first is less than what waiting would do to the figures.

    Only Linux has it, and only for root or with CAP_SYS_NICE: elsewhere nothing changes, and `Rules.late_ms` says
    whether it mattered. What is started meanwhile has it as well, as the threads that sleep until a request is due.
    """
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
        if wanted:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        wanted = False
    try:
        yield wanted
    finally:
        if wanted:
            os.sched_setscheduler(0, policy, param)


async def _until(at_s: float) -> None:
    """Not before `at_s`, and hardly after it.

    An event loop's timers count whole milliseconds. The last few of a wait are slept through by a thread, whose sleep
    is exact to some 0.1 ms; to look at the clock over and over would cost the server its cores.
    """
    if (wait_s := at_s - time.perf_counter() - COARSE_S) > 0:
        await asyncio.sleep(wait_s)
    if (rest_s := at_s - time.perf_counter()) > 0:
        await asyncio.to_thread(time.sleep, rest_s)
