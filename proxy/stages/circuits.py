"""Circuit breakers of instances: calls to stages are watched, and who fails again and again is suspended in the status
table, so that others are asked while there are others. Who hangs, so that its calls would not end, is found here, too;
and what the whole proxy may spend on retries (`RetryBudget`).

    CLOSED --failures in a row--> OPEN --its time has passed--> HALF_OPEN --the probe succeeds--> CLOSED
                                    ^------------------------------ the probe fails, and the time doubles

What counts: an answer, a refusal included, speaks for the instance; a broken connection, a 5xx or a deadline against
it, unless another instance fails on the same body with the same words (`acquit`); a cancellation, and KV that one
instance could not hand to another, for neither. An instance whose engine says that it is dead is taken out: its server
lives on for seconds, until the launcher notices. All of it lives in the proxy's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from epd_serve.errors import DeadlineError, RequestError, StageError
from epd_serve.instances import IncarnationId, Instance
from proxy.background import Background
from proxy.config.limits import RetryLimits
from proxy.errors import KvNotDelivered, StageDied
from proxy.metrics import Metrics
from proxy.registry.table import InstanceTable
from proxy.request.client import CancelScope, ClientSink

logger = logging.getLogger(__name__)

CLOCK_S = 0.001
"""The event loop calls back a little early, within the resolution of its clock."""
CHECK_EVERY_S = 1.0
"""How often it is looked whether calls hang: an instance falls silent without any news."""


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True)
class CircuitLimits:
    """When a circuit opens and for how long.

    Attributes:
        failures: failed calls in a row that open it.
        open_s: how long it stays open at first; doubles with every failed probe, up to `open_max_s`.
    """

    failures: int = 5
    open_s: float = 2.0
    open_max_s: float = 30.0


class Circuit:
    """Of one incarnation, from its first failure until its next success. Pure: time comes in, nothing waits.

    Args:
        random: a number from 0 to 1; spreads the probes of instances that failed together.
    """

    def __init__(self, limits: CircuitLimits, *, random: Callable[[], float] = random.random) -> None:
        self._limits = limits
        self._random = random
        self._failures = 0
        self._open_until: float | None = None
        self._open_s = limits.open_s
        self._probe: object | None = None

    def state(self, now: float) -> State:
        if self._open_until is None:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def suspended(self, now: float) -> bool:
        """Nothing more should be sent there now: it is open, or half-open with its probe under way."""
        state = self.state(now)
        return state is State.OPEN or (state is State.HALF_OPEN and self._probe is not None)

    def began(self, call: object, now: float) -> None:
        """`call` goes to the instance. The first one of a half-open circuit is its probe."""
        if self._probe is None and self.state(now) is State.HALF_OPEN:
            self._probe = call

    def ended(self, call: object) -> None:
        """`call` is over, with or without a verdict before. Any number of times."""
        if self._probe is call:
            self._probe = None

    def failed(self, now: float) -> float:
        """The instance failed a call. Returns for how long that opened the circuit, 0 where it did not."""
        self._failures += 1
        state = self.state(now)
        if state is State.OPEN or (state is State.CLOSED and self._failures < self._limits.failures):
            return 0.0
        if state is State.HALF_OPEN:
            self._open_s = min(2 * self._open_s, self._limits.open_max_s)
        open_s = self._open_s * (0.75 + 0.5 * self._random())
        self._open_until = now + open_s
        return open_s


class Circuits:
    """Those of all incarnations of a table. They are forgotten with them."""

    def __init__(self, table: InstanceTable, metrics: Metrics, limits: CircuitLimits | None = None) -> None:
        self._table = table
        self._metrics = metrics
        self._limits = limits or CircuitLimits()
        self._circuits: dict[IncarnationId, Circuit] = {}

    def call(self, instance: Instance) -> StageCall:
        """Announce a call to `instance`. Enter it as a context; leaving that gives the verdict."""
        return StageCall(self, instance)

    def state(self, instance_id: str, incarnation: str) -> State:
        circuit = self._circuits.get((instance_id, incarnation))
        return circuit.state(_now()) if circuit is not None else State.CLOSED

    def acquit(self, incarnation_ids: Iterable[IncarnationId]) -> None:
        """They failed for their request's sake: such a failure is an answer, as a refusal is."""
        for incarnation_id in incarnation_ids:
            if self._circuits.pop(incarnation_id, None) is not None:
                self._tell(incarnation_id)

    def _note(self, call: StageCall) -> None:
        """It has begun, or ended."""
        if (circuit := self._circuits.get(call.incarnation_id)) is not None:
            if call.ended:
                circuit.ended(call)
            else:
                circuit.began(call, _now())
            self._tell(call.incarnation_id)

    def _failed(self, incarnation_id: IncarnationId) -> None:
        if incarnation_id not in self._circuits:
            for gone in [one for one in self._circuits if self._table.down_s(*one) == math.inf]:
                del self._circuits[gone]
                self._tell(gone)
            self._circuits[incarnation_id] = Circuit(self._limits)
        if open_s := self._circuits[incarnation_id].failed(_now()):
            logger.warning("%s fails again and again: others are asked while there are others", incarnation_id[0])
            self._metrics.circuit_opened.labels(incarnation_id[0]).inc()
            asyncio.get_running_loop().call_later(open_s + CLOCK_S, self._tell, incarnation_id)
        self._tell(incarnation_id)

    def _died(self, name: str, incarnation: str) -> None:
        if self._table.is_alive(name, incarnation):
            self._table.mark_down(name, "its engine is dead", incarnation=incarnation)

    def _tell(self, incarnation_id: IncarnationId) -> None:
        circuit = self._circuits.get(incarnation_id)
        self._table.suspend(*incarnation_id, circuit is not None and circuit.suspended(_now()))


class StageCall:
    """One call to one instance, from its choice on: a half-open circuit has its probe at once.

    `judged`: the instance has answered, or failed. `ended`: nothing more comes of it.
    """

    def __init__(self, circuits: Circuits, instance: Instance) -> None:
        self.incarnation_id = instance.incarnation_id
        self.judged = self.ended = False
        self._failed = False
        self._circuits = circuits
        circuits._note(self)

    def succeeded(self) -> None:
        """It answers: for a stream that is known at the first event."""
        if not self.judged:
            self.judged = True
            self._circuits.acquit([self.incarnation_id])

    def failed(self) -> None:
        """It failed, though it may have begun well. Any number of times."""
        if not self._failed:
            self.judged = self._failed = True
            self._circuits._failed(self.incarnation_id)

    def over(self) -> None:
        """Nothing more comes of it. Any number of times."""
        self.ended = True
        self._circuits._note(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, RequestError):
            self.succeeded()
        elif isinstance(error, StageError) and not isinstance(error, KvNotDelivered):
            if error.stage == self.incarnation_id[0]:
                self.failed()
                if isinstance(error, StageDied) and error.for_good:
                    self._circuits._died(*self.incarnation_id)
        elif isinstance(error, DeadlineError):
            self.failed()
        self.over()


class StallWatchdog:
    """Cancels attempts that another one could follow when an instance of theirs has stopped to report, or does not
    answer on /health any more. Such a stage, or one whose host has gone, keeps its connections open, so nothing else
    ends the wait before its deadline. One look a second over all of them.

    Args:
        silence_s: for how long an instance that reports may say nothing while others do, and any be said to be down.
        background: takes what goes wrong in a look; the next one follows all the same.
    """

    def __init__(self, table: InstanceTable, silence_s: float, background: Background) -> None:
        self._table = table
        self._silence_s = silence_s
        self._background = background
        self._watched: dict[CancelScope[StageError], tuple[ClientSink, Sequence[StageCall], float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(
        self,
        cancel_scope: CancelScope[StageError],
        sink: ClientSink,
        calls: Sequence[StageCall],
        silence_s: float | None = None,
    ) -> None:
        """An attempt makes these calls, until `unwatch`: cancel it, while another one could follow, with the error
        about a silent one. Once the last of these calls is answered, nothing hangs on the others. `silence_s`: where
        it is another one than usual."""
        self._watched[cancel_scope] = (sink, calls, self._silence_s if silence_s is None else silence_s)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    def unwatch(self, cancel_scope: CancelScope[StageError]) -> None:
        self._watched.pop(cancel_scope, None)

    def _check(self) -> None:
        self._timer = None
        for cancel_scope, (sink, calls, silence_s) in self._watched.items():
            with self._background.handling("look at a stage"):
                for call in calls[-1:] if calls[-1].judged else calls:
                    if sink.repeatable and not call.ended:
                        self._judge(cancel_scope, call, silence_s)
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    def _judge(self, cancel_scope: CancelScope[StageError], call: StageCall, limit_s: float) -> None:
        stage, silent_s = call.incarnation_id[0], self._table.silence_s(*call.incarnation_id)
        down_s = self._table.down_s(*call.incarnation_id)
        if (ago_s := max(silent_s, down_s)) > limit_s:
            call.failed()
            what = "has stopped to report" if silent_s > limit_s else "is down"
            ago_s = ago_s if ago_s < math.inf else 0.0
            cancel_scope.cancel(StageDied(f"stage {stage} {what}", stage=stage, ago_s=ago_s))


def _now() -> float:
    return asyncio.get_running_loop().time()


class RetryBudget:
    """A token bucket that requests fill (Finagle's retry budget). Without it an outage multiplies its own load: every
    request would be tried several times just when least can be served.

    Full at first. Every request puts in `limits.ratio`, every second `limits.floor_per_s`; a retry takes 1.
    """

    def __init__(self, limits: RetryLimits, *, now: float) -> None:
        self._limits = limits
        self._retries = float(limits.burst)
        self._filled_at = now

    def left(self, now: float) -> float:
        """Retries that may be made now."""
        self._add(self._limits.floor_per_s * max(0.0, now - self._filled_at))
        self._filled_at = max(now, self._filled_at)
        return self._retries

    def deposit(self) -> None:
        """A request was admitted."""
        self._add(self._limits.ratio)

    def withdraw(self, now: float) -> bool:
        """Pay for a retry. False: there is none to be had, the failure is the answer."""
        if self.left(now) < 1.0:
            return False
        self._add(-1.0)
        return True

    def _add(self, retries: float) -> None:
        self._retries = min(float(self._limits.burst), self._retries + retries)
