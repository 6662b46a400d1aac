"""The circuits of all incarnations: watches calls to stages, and has the status table suspend whom they condemn, and
take out whose engine says that it is dead: its server lives on for seconds, until the launcher notices.

Lives in the proxy's event loop. What a verdict does to one circuit is `proxy/stages/circuit.py`'s business; here is
what counts as one: an answer, a refusal included, speaks for the instance; a broken connection, a 5xx or a deadline
against it, unless another instance fails on the same body with the same words (`acquit`); a cancellation, and KV that
one instance could not hand to another, for neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from epd_serve.errors import DeadlineError, RequestError, StageError
from epd_serve.instances import IncarnationId, Instance
from proxy.errors import KvNotDelivered, StageDied
from proxy.metrics import Metrics
from proxy.registry.table import InstanceTable
from proxy.stages.circuit import Circuit, CircuitLimits, State

logger = logging.getLogger(__name__)
MAX_CIRCUITS = 4096
"""Incarnations with something to remember; those that failed longest ago are forgotten first."""

CLOCK_S = 0.001
"""The event loop calls back a little early, within the resolution of its clock."""


class Circuits:
    """An incarnation has a circuit from its first failure until its next success."""

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
            self._succeeded(incarnation_id)

    def _began(self, call: StageCall) -> None:
        circuit = self._circuits.get(call.incarnation_id)
        if circuit is not None:
            circuit.began(call, _now())
            self._tell(call.incarnation_id, circuit)

    def _ended(self, call: StageCall) -> None:
        circuit = self._circuits.get(call.incarnation_id)
        if circuit is not None:
            circuit.ended(call)
            self._tell(call.incarnation_id, circuit)

    def _succeeded(self, incarnation_id: IncarnationId) -> None:
        circuit = self._circuits.pop(incarnation_id, None)
        if circuit is not None:
            circuit.succeeded()
            self._tell(incarnation_id, circuit)

    def _failed(self, call: StageCall) -> None:
        if call.incarnation_id not in self._circuits and len(self._circuits) >= MAX_CIRCUITS:
            self._forget(next(iter(self._circuits)))
        circuit = self._circuits.pop(call.incarnation_id, Circuit(self._limits))
        self._circuits[call.incarnation_id] = circuit  # as the one that failed last
        now = _now()
        if circuit.failed(now):
            logger.warning("%s fails again and again: others are asked while there are others", call.incarnation_id[0])
            self._metrics.circuit_opened.labels(call.incarnation_id[0]).inc()
            asyncio.get_running_loop().call_later(
                circuit.open_for_s(now) + CLOCK_S, self._look_again, call.incarnation_id
            )
        self._tell(call.incarnation_id, circuit)

    def _died(self, incarnation_id: IncarnationId) -> None:
        if self._table.is_alive(*incarnation_id):
            name, incarnation = incarnation_id
            self._table.mark_down(name, "its engine is dead", incarnation=incarnation)

    def _forget(self, incarnation_id: IncarnationId) -> None:
        """Forget its circuit, and end the suspension that only the circuit would have ended."""
        del self._circuits[incarnation_id]
        self._table.suspend(*incarnation_id, False)

    def _tell(self, incarnation_id: IncarnationId, circuit: Circuit) -> None:
        self._table.suspend(*incarnation_id, circuit.suspended(_now()))

    def _look_again(self, incarnation_id: IncarnationId) -> None:
        circuit = self._circuits.get(incarnation_id)
        if circuit is not None:
            self._table.suspend(*incarnation_id, circuit.suspended(_now()))


class StageCall:
    """One call to one instance, from its choice on: a half-open circuit has its probe at once.

    `judged`: the instance has answered, or failed. `ended`: nothing more comes of it.
    """

    def __init__(self, circuits: Circuits, instance: Instance) -> None:
        self.incarnation_id = instance.incarnation_id
        self.judged = self.ended = False
        self._failed = False
        self._circuits = circuits
        circuits._began(self)

    def succeeded(self) -> None:
        """It answers: for a stream that is known at the first event."""
        if not self.judged:
            self.judged = True
            self._circuits._succeeded(self.incarnation_id)

    def failed(self) -> None:
        """It failed, though it may have begun well. Any number of times."""
        if not self._failed:
            self.judged = self._failed = True
            self._circuits._failed(self)

    def over(self) -> None:
        """Nothing more comes of it. Any number of times."""
        self.ended = True
        self._circuits._ended(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, RequestError):
            self.succeeded()
        elif self._condemned_by(error):
            self.failed()
            if isinstance(error, StageDied) and error.for_good:
                self._circuits._died(self.incarnation_id)
        self.over()

    def _condemned_by(self, error: BaseException) -> bool:
        if isinstance(error, StageError):
            return error.stage == self.incarnation_id[0] and not isinstance(error, KvNotDelivered)
        return isinstance(error, DeadlineError)


def _now() -> float:
    return asyncio.get_running_loop().time()
