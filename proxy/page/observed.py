"""What the page shows, as one answer: the deployment, its instances, the last minute, requests.

Asked where all front doors are known; a front door asks there by its feed (`proxy/workers/worker.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from proxy.http.status import instances
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.table import InstanceTable


class Seen(msgspec.Struct, frozen=True):
    """Attributes:
    records: of all front doors, as asked.
    deployment, instances: as `GET /deployment` and `/instances` of the admin listener, JSON; `null` a deployment of
        which nobody here knows more than its instances. Empty where not asked for.
    """

    records: RecordsAnswer
    deployment: bytes = b""
    instances: bytes = b""


Observe = Callable[[Question, bool], Awaitable[Seen]]
"""Asks for records and, if the second is true, for all the rest. Raises EpdError where nobody answers."""

Status = Callable[[], Awaitable[dict[str, Any]]]


class Doors(Protocol):
    """All front doors.

    Attributes:
        deployment: says what the deployment is, where somebody knows.
    """

    deployment: Status | None

    @property
    def table(self) -> InstanceTable: ...

    async def look(self, question: Question) -> RecordsAnswer: ...


class Observed:
    """An `Observe`, beside whoever knows all front doors."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors

    async def __call__(self, question: Question, whole: bool) -> Seen:
        doors = self._doors
        records = await doors.look(question)
        if not whole:
            return Seen(records)
        deployment = await doors.deployment() if doors.deployment is not None else None
        table = instances(doors.table)["instances"]
        return Seen(records, msgspec.json.encode(deployment), msgspec.json.encode(table))
