"""One client request on its way through the stages: what every step may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.admission.gate import Pass
from proxy.media.loader import LoadedItem
from proxy.records.record import Record
from proxy.registry.feature_directory import Metadata
from proxy.request.parse import ParsedRequest
from proxy.stages.poison import WatchedBody
from proxy.stages.prompt import NO_NODES, PromptNodes
from proxy.stages.retries import Faults


@dataclass(frozen=True)
class Features:
    """What became of a job's items at the encoders.

    Attributes:
        missing: keys of items that no encoder produced; the prefilling stage encodes them from the media.
        metadata: what stands in for the media, by key, where that is known.
        metadata_in_use: the encoders of this deployment give metadata, for whatever item.
    """

    missing: tuple[str, ...] = ()
    metadata: Mapping[str, Metadata] = field(default_factory=dict)
    metadata_in_use: bool = False


class Job(msgspec.Struct, frozen=True):
    """
    Attributes:
        id: sent to every stage as `X-Request-Id`.
        base: the client's body with media inlined and keyed (`proxy.stages.bodies.base_body`).
        items: the media items behind it.
        tokens: of the whole prompt, estimated (`proxy/stages/prompt.py`).
        prompt: how its beginnings are recognised (`proxy.stages.prompt.py`).
        features: what the encoders have made of the items; None where no encoder was to be asked.
        passed: its place with the stages.
        watched: its body, which may be what instances die of.
        record: what becomes of it; steps note there what they do.
        faults: the 500s of live instances, encoders among them.
    """

    id: str
    request: ParsedRequest
    base: Mapping[str, Any]
    items: tuple[LoadedItem, ...]
    tokens: float
    passed: Pass
    watched: WatchedBody
    record: Record
    prompt: PromptNodes = NO_NODES
    features: Features | None = None
    faults: Faults = msgspec.field(default_factory=Faults)

    def headers(self, span: str) -> dict[str, str]:
        """Of a call with this span (`Record.call_span`)."""
        trace = self.record.trace
        return {"x-request-id": self.id, **(trace.headers(span) if trace is not None else {})}
