"""One client request on its way from its arrival to the last byte of its answer: what each step has made of it; and
what the steps of all requests share.

There is one context per exchange. Each step sets the fields of its group and reads those of the groups before; a field
that no step has set yet is not there (AttributeError), unless it has a default. It is changed by one task at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from epd_serve.instances import IncarnationId
from proxy.admission.gate import Pass
from proxy.config.settings import ProxySettings
from proxy.media.loader import LoadedItem
from proxy.metrics import Metrics
from proxy.records.record import Record
from proxy.registry.announcements import AnnouncementDispatcher
from proxy.registry.feature_directory import Metadata
from proxy.registry.table import InstanceTable
from proxy.request.client import ClientSink
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.routing.plan import Plan
from proxy.stages.circuits import Circuits, RetryBudget, StallWatchdog
from proxy.stages.client import StageClient
from proxy.stages.history import TokenHistory
from proxy.stages.poison import Faults, WatchedBody
from proxy.stages.prompt import NO_NODES, PromptNodes
from proxy.tenants import Caller, MemoryReservation


class Delivery(StrEnum):
    """How P and D are given the media (`proxy/generate/recovery.py`)."""

    METADATA = "metadata"
    FEATURES = "features"
    PIXELS = "pixels"


@dataclass(frozen=True)
class Features:
    """What became of a request's items at the encoders.

    Attributes:
        missing: keys of items that no encoder produced; the prefilling stage encodes them from the media.
        metadata: what stands in for the media, by key, where that is known.
        metadata_in_use: the encoders of this deployment give metadata, for whatever item.
        parts: keys of the parts of each item that several encoders made together, by its key.
    """

    missing: tuple[str, ...] = ()
    metadata: Mapping[str, Metadata] = field(default_factory=dict)
    metadata_in_use: bool = False
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def without(self, keys: list[str]) -> Features:
        """The same, where the prefilling stage need not wait for these any more."""
        missing = tuple(dict.fromkeys((*self.missing, *keys)))
        parts = {key: its for key, its in self.parts.items() if key not in missing}
        return Features(missing, self.metadata, self.metadata_in_use, parts)


class Services(NamedTuple):
    """What the steps of all requests of a process share."""

    settings: ProxySettings
    metrics: Metrics
    table: InstanceTable
    stages: StageClient
    circuits: Circuits
    budget: RetryBudget
    watchdog: StallWatchdog
    dispatcher: AnnouncementDispatcher


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request.

    Attributes:
        id: sent to every stage as `X-Request-Id`.
        endpoint: what its client asked. sink: the client's side of the exchange. record: what becomes of it; steps note
            there what they do.
        stage_priorities: the stages heed when requests are due.
        asked_slo_s: the client's own objectives, as `slo_s`.
        caller: who asks. until: loop time by which the client wants the whole answer, infinite where it said nothing.
            held: has the bytes of the body, and of all that is made of it.

        request: the checked body. watched: the body as what instances may die of. history: what the client has of a
            stream.

        slo_s: what a streamed answer is to keep to: seconds to its first token, and per token after that.
        passed: its place with the stages.

        items: the media items. base: the client's body with media inlined and keyed (`proxy.stages.bodies.base_body`).
        tokens: of the whole prompt, estimated. answer_tokens: those of a stream that are part of the prompt where it
            goes on. prompt: how its beginnings are recognised (`proxy/stages/prompt.py`).

        plan: of the next attempt, unless it is out of date by then. because: why a next plan is made.

        encoding: under way; ends with `features` set. features: what the encoders have made of the items, or will have
            if all goes well; None where no encoder was to be asked.

        delivery: of the media, in the next attempt.
        avoid: incarnations at which it has failed. failures: attempts since the client last got something.
        faults: the 500s of live instances, encoders among them.
        probing_until: loop time until which an instance that cannot be reached is tried again.
        encoded_again: how often lost features were. doubted: an attempt failed with nobody saying that a feature was
            missing.
    """

    id: str
    endpoint: Endpoint
    sink: ClientSink
    record: Record
    stage_priorities: bool = False
    asked_slo_s: tuple[float | None, float | None] = (None, None)
    caller: Caller = field(init=False)
    until: float | None = field(init=False, default=None)
    held: MemoryReservation = field(init=False)
    # parse
    request: ParsedRequest = field(init=False)
    watched: WatchedBody = field(init=False)
    history: TokenHistory = field(init=False)
    # admit
    slo_s: tuple[float, float] = field(init=False)
    passed: Pass = field(init=False)
    # load
    items: tuple[LoadedItem, ...] = field(init=False, default=())
    base: Mapping[str, Any] = field(init=False)
    tokens: float = field(init=False, default=0.0)
    answer_tokens: int = field(init=False, default=0)
    prompt: PromptNodes = field(init=False, default=NO_NODES)
    # plan
    plan: Plan | None = field(init=False, default=None)
    because: str = field(init=False, default="it arrived")
    # encode
    encoding: asyncio.Task[None] | None = field(init=False, default=None)
    features: Features | None = field(init=False, default=None)
    # generate
    delivery: Delivery = field(init=False, default=Delivery.PIXELS)
    avoid: set[IncarnationId] = field(init=False, default_factory=set)
    failures: int = field(init=False, default=0)
    faults: Faults = field(init=False, default_factory=Faults)
    probing_until: float | None = field(init=False, default=None)
    encoded_again: int = field(init=False, default=0)
    doubted: bool = field(init=False, default=False)

    def holds_to(self, usual: tuple[float, float], of_model: tuple[float, float] | None) -> None:
        """Its objectives: those that its client names, else its key's, its model's, the `usual` ones."""
        asked, limits, sink = self.asked_slo_s, self.caller.limits, self.sink
        ttft_s, tpot_s = of_model or usual
        self.slo_s = (
            asked[0] or limits.slo_ttft_ms / 1e3 or ttft_s,
            asked[1] or limits.slo_tpot_ms / 1e3 or tpot_s,
        )
        if self.slo_s != usual:
            self.record.ttft_limit_s, sink.gaps.limit_s = self.slo_s

    def due(self) -> None:
        """What it asks of stages now is due when it is due itself."""
        if self.stage_priorities:
            self.base = {**self.base, "priority": self.passed.stage_priority}

    def headers(self, span: str) -> dict[str, str]:
        """Of a call of a stage with this span (`Record.call_span`)."""
        trace = self.record.trace
        return {"x-request-id": self.id, **(trace.headers(span) if trace is not None else {})}
