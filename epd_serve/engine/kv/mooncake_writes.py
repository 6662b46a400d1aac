"""One-sided writes of one Mooncake link: each is followed to its own end, and none is forgotten while it may land.

A batch per write over `tcp` and `rdma`. Mooncake's `transfer_check_status` asks for the first task of a batch only, so
of a batch of several it says done while the others move; and it frees a batch only when all of its tasks were asked
for, so such a batch stays in memory for good. `batch_transfer_sync_write` asks for all, but spins on a core until they
are there, and gives up the whole batch with its first failure, so that nobody learns what becomes of the rest. Measured
over TCP on two cores, 8 MiB in 32 writes: 2.8 ms and 3.2 ms of CPU so, 7.6 ms and 7.6 ms of CPU by the synchronous
call.

Over `ascend` a batch per list: there a batch is one synchronous transfer on one of eight threads, so a packet of 128
blocks would be 128 of them. `batch_transfer_sync_write` is what vllm-ascend calls, too. It has Mooncake's own deadline
(`ASCEND_TRANSFER_TIMEOUT`); of a list that failed, all counts as failed.

What may still land after a write has failed:

    pending, or -2 (too late)   until Mooncake says how it ended, at most `quarantine_s`
    -1 (failed)                 `quarantine_s`: bytes on their way arrive all the same (Mooncake #4247), and the batch
                                is freed, so it must not be asked again

A write that nobody minds any more, as its quarantine is over or its target gone, is asked for as long again and then
forgotten: its batch stays in Mooncake's memory, which no call can free.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from epd_serve.engine.kv.transport import LinkError
from npu_ops.fences import DEADLINE_S

logger = logging.getLogger(__name__)

UNDER_WAY = 512  # writes at once; Mooncake lets 1024 wait for a peer by default
_MOST_LEFT = 8 * UNDER_WAY
_NO_BATCH = (0, 2**64 - 1)  # 0.3.11.post1 answers -1 as an unsigned number, and asking for that would crash the process
_PENDING, _DONE, _FAILED = 0, 1, -1
_ASK_EVERY_S = 0.05  # thousands may have been left, and the link asks whenever it has moved something
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3

Write = tuple[int, int, int]  # source address, target address, bytes


@dataclass
class _Left:
    """A write that was left to itself.

    `number`: how many were before it; `batch`: 0 once it is freed; `lands_until`: it may write until then.
    """

    number: int
    batch: int
    lands_until: float


class Writes:
    """For one thread.

    Args:
        engine: Mooncake's; asked for when there is something to write.
        timeout_s: for how long none of the writes may end.
        quarantine_s: for how long a write may land of which nothing is known.
        lists: write in lists, each by one synchronous call.
        clock, sleep: in seconds.

    Attributes:
        given_up: writes that were left to themselves so far.
    """

    def __init__(
        self,
        engine: Callable[[], Any],
        timeout_s: float,
        quarantine_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        lists: bool = False,
    ) -> None:
        self._engine = engine
        self._lists = lists
        self._timeout_s, self._quarantine_s = timeout_s, quarantine_s
        self._clock, self._sleep = clock, sleep
        self.given_up = 0
        self._left: list[_Left] = []
        self._asked_at = -math.inf

    def run(self, session: str, writes: Iterable[Write], *, harmless: bool = False) -> None:
        """Returns when all bytes are there.

        Args:
            harmless: whenever they land nobody minds.

        Raises:
            LinkError: a write failed, was not accepted, or none ended in time. Some may still land (`may_land`).
        """
        engine = self._engine()
        self._look_after()
        if (landing := self._landing(self.given_up)) >= _MOST_LEFT:
            raise LinkError(f"{landing} writes that were given up may still land")
        if self._lists:
            self._run_lists(engine, session, list(writes), harmless=harmless)
            return
        under_way = deque[int]()
        until = self._clock() + DEADLINE_S
        try:
            for source, target, nbytes in writes:
                if len(under_way) == UNDER_WAY:
                    self._finish_oldest(engine, session, under_way, until)
                batch = engine.batch_transfer_async_write(session, [source], [target], [nbytes])
                if batch in _NO_BATCH:
                    raise LinkError(f"Mooncake did not accept a write to {session}")
                under_way.append(batch)
            while under_way:
                self._finish_oldest(engine, session, under_way, until)
        finally:
            self._leave(under_way, harmless=harmless)

    def may_land(self, given_up: int) -> bool:
        """Whether one of the first so many that were given up may still change memory that somebody uses."""
        self._look_after()
        return self._landing(given_up) > 0

    def target_gone(self) -> None:
        """The process that they were for is no more."""
        now = self._clock()
        for left in self._left:
            left.lands_until = min(left.lands_until, now)

    def _run_lists(self, engine: Any, session: str, writes: Sequence[Write], *, harmless: bool) -> None:
        for start in range(0, len(writes), UNDER_WAY):
            sources, targets, sizes = map(list, zip(*writes[start : start + UNDER_WAY], strict=True))
            status = engine.batch_transfer_sync_write(session, sources, targets, sizes)
            if status != 0:
                self._leave([0], harmless=harmless)
                raise LinkError(f"a list of {len(sizes)} writes to {session} failed with status {status}")

    def _leave(self, batches: Collection[int], *, harmless: bool) -> None:
        until = self._clock() + (0.0 if harmless else self._quarantine_s)
        self._left += [_Left(number, batch, until) for number, batch in enumerate(batches, self.given_up)]
        self.given_up += len(batches)

    def _landing(self, given_up: int) -> int:
        now = self._clock()
        return sum(left.number < given_up and left.lands_until > now for left in self._left)

    def _finish_oldest(self, engine: Any, session: str, under_way: deque[int], until: float) -> None:
        """Those that came later may have ended before: each is asked for in its turn, so all are, once or little more.

        `until`: for all writes together, since a link that takes longer over them would pass for one that hangs.
        Raises LinkError; the write then still stands first, as 0 where its batch is freed.
        """
        deadline = min(self._clock() + self._timeout_s, until)
        pause_s = _FIRST_PAUSE_S
        while (status := engine.transfer_check_status(under_way[0])) == _PENDING:
            if self._clock() > deadline:
                raise LinkError(f"a write to {session} took longer than {self._timeout_s} s")
            self._sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        if status == _DONE:
            under_way.popleft()
            return
        if status == _FAILED:
            under_way[0] = 0
        raise LinkError(f"a write to {session} failed with status {status}")

    def _look_after(self) -> None:
        """Asks how those ended that were left to themselves, which also frees them; forgets what nobody minds."""
        now = self._clock()
        if now < self._asked_at + _ASK_EVERY_S:
            return
        self._asked_at = now
        kept, forgotten = [], 0
        for left in self._left:
            status = self._engine().transfer_check_status(left.batch) if left.batch else _PENDING
            if status == _DONE:
                continue
            if status == _FAILED:
                left.batch = 0
                if left.lands_until > now:
                    left.lands_until = now + self._quarantine_s
            if left.lands_until > now or (left.batch and left.lands_until + self._quarantine_s > now):
                kept.append(left)
            else:
                forgotten += left.batch != 0
        self._left = kept
        if forgotten:
            logger.warning("Mooncake never ended %d writes: it keeps their memory", forgotten)
