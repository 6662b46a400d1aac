"""Whether a call that failed is made again: what the whole proxy may spend on retries, and what tells that a failure is
about the request's body, which fails wherever it is sent. Pure: time comes in.
"""

from __future__ import annotations

from collections import defaultdict

from epd_serve.instances import IncarnationId
from proxy.config.limits import RetryLimits
from proxy.errors import FaultyBody, StageFault
from proxy.stages import sse

GENERIC = "500: Internal server error"
"""How vLLM (0.23 to 0.32, `GenerationError`) says that a request failed in the engine, as where its KV did not come."""
NEVER_THE_BODY = (GENERIC, f"500: {sse.ABORTED}")


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


class Faults:
    """The 500s of live instances under one request: the same words from two of them are about its body.

    A body that vLLM did not expect fails wherever it is sent, and says nothing about who it is sent to. What an engine
    could not do (`GENERIC`) is not told from that by its words, and is never the body's, nor is the end of an engine.
    """

    def __init__(self) -> None:
        self._said: defaultdict[str, set[IncarnationId]] = defaultdict(set)

    def note(self, fault: StageFault, incarnation_id: IncarnationId) -> frozenset[IncarnationId]:
        """Returns those who are not to blame, since each of them said the same; none while only one did."""
        said = self._said[fault.said]
        said.add(incarnation_id)
        return frozenset(said) if len(said) > 1 and fault.said not in NEVER_THE_BODY else frozenset()


def faulty_body(fault: StageFault) -> FaultyBody:
    return FaultyBody(f"Two instances failed alike on this request body, with {fault.said}; change it.")
