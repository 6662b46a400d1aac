"""Bodies under which instances died: tried once more, alone, and refused for a while when that one dies, too.

A poisonous body kills whoever works on it, so repeating it elsewhere walks through the fleet. Whoever shared an
instance with it at its death looks just as guilty. So suspects (`proxy/stages/poison_records.py` says who is one) are
tried one at a time, the one that was sent last before the death first, since that is what killed most likely. A trial
lasts until the answer, and not much longer than the instance had lasted with it. Whoever has waited for that during
`blame_s` goes on untried: most instances die of something else, and then all of them are innocent.

All of it is counted by one process: neither workers nor replicas know of each other's suspects, so N of them lose at
most 2 N instances to one body.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable

import xxhash

from epd_serve.errors import StageError
from epd_serve.instances import IncarnationId
from proxy.config.limits import PoisonLimits
from proxy.errors import PoisonousRequest
from proxy.metrics import Metrics
from proxy.stages.poison_records import DEATHS, EXPLAINED, PoisonRecords, names_of

logger = logging.getLogger(__name__)

GATHER_S = 0.05
"""After a death, until everybody who was there has noticed: only then can the one that was sent last go first."""

LEAST_S = 1.0
"""How long a trial lasts at least, where no answer ends it: an instance may have more to do than the one that died."""


class Suspects:
    """The suspected bodies of one process, in its event loop.

    Args:
        wait_s: how long the one on trial may wait for an instance, and so the others for it.
    """

    def __init__(self, limits: PoisonLimits, metrics: Metrics, *, wait_s: float) -> None:
        self._limits = limits
        self._metrics = metrics
        self._wait_s = wait_s
        self._salt = secrets.randbits(64)  # of this process: digests tell nobody else which bodies were sent
        self._records = PoisonRecords(limits)
        self._shared: OrderedDict[IncarnationId, int] = OrderedDict()  # those that died last: by how many requests
        self._on_trial: Trial | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[asyncio.Future[None], Trial] = {}
        metrics.suspects.labels("suspected").set_function(lambda: self._records.count(refused=False))
        metrics.suspects.labels("refused").set_function(lambda: self._records.count(refused=True))

    def trial(self, body: bytes | bytearray) -> Trial:
        """Returns the trial of a request with this body."""
        return Trial(self, xxhash.xxh3_128_digest(body, seed=self._salt))

    # --- what trials ask and say --------------------------------------------------------------------------------

    def _check(self, digest: bytes) -> None:
        if not self._records:
            return
        now = _now()
        record = self._records.get(digest, now)
        if record is not None and record.refused_until:
            self._metrics.refused.labels("poisonous").inc()
            raise PoisonousRequest(
                f"{DEATHS} instances ended while they worked on this request body; it is refused for "
                f"{record.refused_until - now:.0f} s. Change it, or report it to the operator.",
            )

    def _suspected(self, digest: bytes) -> bool:
        record = self._records.get(digest, _now()) if self._records else None
        return record is not None and record.suspected

    def _died(self, trial: Trial, incarnation_id: IncarnationId, sent_at: float, encoding: bool, ago_s: float) -> None:
        now = _now()
        died_at = now - ago_s
        convicted = self._records.died(
            trial.digest,
            incarnation_id,
            sent_at=sent_at,
            died_at=died_at,
            now=now,
            encoding=encoding,
            on_trial=self._on_trial is trial or died_at <= trial.ended_at,
        )
        if convicted is not None:
            for_s = convicted.refused_until - now
            self._metrics.poisonous.inc()
            logger.error("a request body under which %s ended is refused for %.0f s", convicted.names, for_s)
            self._wake()

    def _share(self, incarnation_id: IncarnationId) -> None:
        self._shared[incarnation_id] = self._shared.pop(incarnation_id, 0) + 1
        if len(self._shared) > EXPLAINED:
            self._shared.popitem(last=False)

    def _survived(self, digest: bytes, *, encoding: bool) -> None:
        if self._records.survived(digest, encoding=encoding):
            self._wake()

    # --- one at a time ------------------------------------------------------------------------------------------

    async def _turn(self, trial: Trial, before_waiting: Callable[[], None]) -> None:
        """Wait until `trial` is the only one that is on trial, or need not be, or has waited for too long."""
        if self._on_trial is trial or not self._suspected(trial.digest):
            return
        before_waiting()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = trial
        if self._on_trial is None:
            loop.call_later(GATHER_S, self._wake)
        try:
            await asyncio.wait([waiter], timeout=self._wait_s + 2 * self._limits.blame_s)
        except BaseException:
            del self._waiting[waiter]  # first, or it would be its turn again
            self._end(trial)  # it may have been its turn
            raise
        del self._waiting[waiter]
        waiter.cancel()

    def _send(self, trial: Trial) -> None:
        if self._on_trial is not trial:
            return
        record = self._records.get(trial.digest, _now())
        if self._timer is not None:
            self._timer.cancel()
        loop, blame_s = asyncio.get_running_loop(), self._limits.blame_s
        lasts_s = LEAST_S + 2 * record.age_s if record is not None else 0.0
        self._timer = loop.call_later(min(blame_s, lasts_s), self._end, trial)
        if self._waiting:
            loop.call_later(blame_s, _let_go, tuple(self._waiting))

    def _end(self, trial: Trial) -> None:
        if self._on_trial is trial:
            self._on_trial = None
            trial.ended_at = _now()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            self._wake()

    def _wake(self) -> None:
        """Whoever is no suspect any more goes on; of the others the one that was sent last, when none is on trial."""
        now = _now()
        waiting = [(trial, self._records.get(trial.digest, now)) for trial in self._waiting.values()]
        sent_at = {trial: record.sent_at for trial, record in waiting if record is not None and record.suspected}
        if sent_at and self._on_trial is None:
            self._on_trial = max(sent_at, key=sent_at.__getitem__)
        stay = {trial for trial in sent_at if trial is not self._on_trial}
        _let_go(waiter for waiter, trial in self._waiting.items() if trial not in stay)


class Trial:
    """One request on its way, before `Suspects`."""

    def __init__(self, suspects: Suspects, digest: bytes) -> None:
        self.digest = digest
        self.ended_at = float("-inf")  # when it was on trial last
        self._suspects = suspects
        self._deaths: dict[IncarnationId, bool] = {}  # since its last answer; True: it ended an attempt
        self._died_at = float("-inf")
        self._turns = 0

    @property
    def suspected(self) -> bool:
        """Its body may be what an instance died of."""
        return self._suspects._suspected(self.digest)

    @property
    def exhausted(self) -> bool:
        """It was tried once more after an instance had died under it and no other request, and so did another one."""
        shared = self._suspects._shared
        return sum(own and shared.get(one) == 1 for one, own in self._deaths.items()) >= DEATHS

    def check(self) -> None:
        """Raises PoisonousRequest: its body is refused. StageError: enough instances have died under this request."""
        self._suspects._check(self.digest)
        if self.exhausted:
            names = names_of(self._deaths)
            raise StageError(f"{names} ended while they worked on this alone; it is not tried again", stage=names)

    def turn(self, before_waiting: Callable[[], None]) -> _Turn:
        """Enter for one attempt, from several tasks too: waits until no other suspect is on trial, if this is one.

        Args:
            before_waiting: gives back what others would have to wait for meanwhile.
        """
        return _Turn(self, before_waiting)

    def sent(self) -> None:
        """The attempt has an instance from now on: if it is a trial, its time begins."""
        self._suspects._send(self)

    def died(
        self,
        incarnation_id: IncarnationId,
        *,
        sent_at: float,
        encoding: bool = False,
        ago_s: float = 0.0,
        answered: bool = False,
    ) -> None:
        """An instance died under this request, to which it was sent at loop time `sent_at`. `ago_s`: before now.
        `answered`: it had answered, and died of something else. The same death may be told again."""
        if incarnation_id in self._deaths:
            return
        self._suspects._share(incarnation_id)
        if answered:
            return
        own = self._deaths[incarnation_id] = sent_at >= self._died_at  # of what was sent together, all is one attempt
        if own:
            self._died_at = _now()
        self._suspects._metrics.deaths.labels(incarnation_id[0]).inc()
        self._suspects._died(self, incarnation_id, sent_at, encoding, ago_s)

    def survived(self, *, encoding: bool = False) -> None:
        """It was answered, or only encoded: what an encoder died of was something else."""
        self._suspects._survived(self.digest, encoding=encoding)
        if not encoding:
            self._deaths.clear()
            self._suspects._end(self)


class _Turn:
    """One attempt of a trial."""

    __slots__ = ("_before_waiting", "_trial")

    def __init__(self, trial: Trial, before_waiting: Callable[[], None]) -> None:
        self._trial = trial
        self._before_waiting = before_waiting

    async def __aenter__(self) -> None:
        await self._trial._suspects._turn(self._trial, self._before_waiting)
        self._trial._turns += 1

    async def __aexit__(self, *_: object) -> None:
        self._trial._turns -= 1
        if not self._trial._turns:
            self._trial._suspects._end(self._trial)


def _let_go(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
