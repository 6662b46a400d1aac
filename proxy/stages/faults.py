"""The 500s of live instances under one request: the same words from two of them are about its body.

A body that vLLM did not expect fails wherever it is sent, and says nothing about who it is sent to. What an engine
could not do (`GENERIC`) is not told from that by its words, and is never the body's, nor is the end of an engine.
"""

from __future__ import annotations

from epd_serve.instances import IncarnationId
from proxy.errors import FaultyBody, StageFault
from proxy.stages import sse

GENERIC = "500: Internal server error"
"""How vLLM (0.23 to 0.32, `GenerationError`) says that a request failed in the engine, as where its KV did not come."""
NEVER_THE_BODY = (GENERIC, f"500: {sse.ABORTED}")


class Faults:
    """Of one request."""

    def __init__(self) -> None:
        self._said: dict[str, set[IncarnationId]] = {}

    def note(self, fault: StageFault, incarnation_id: IncarnationId) -> frozenset[IncarnationId]:
        """Returns those who are not to blame, since each of them said the same; none while only one did."""
        said = self._said.setdefault(fault.said, set())
        said.add(incarnation_id)
        return frozenset(said) if len(said) > 1 and fault.said not in NEVER_THE_BODY else frozenset()


def faulty_body(fault: StageFault) -> FaultyBody:
    return FaultyBody(f"Two instances failed alike on this request body, with {fault.said}; change it.")
