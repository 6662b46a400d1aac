"""What the page shows, and is told every second as server-sent events: looked at once however many watch, and not while
nobody does.

All of it is one answer: the deployment, its instances, the last minute, requests. It is given where all front doors are
known; a front door asks there by its feed (`proxy/workers/worker.py`). A part of it is sent when it has changed, whole;
a new listener gets all parts first. One that does not read is not waited for: when it reads again it gets what is so
then.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from epd_serve.errors import EpdError, OverloadedError
from proxy.http.status import instances
from proxy.records.counts import MINUTE_S, Counts
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.table import InstanceTable

EVERY_S = 1.0
LOOK_S = 8.0
"""How long what there is to tell may take to be found out; after that it is told that it cannot."""

REQUESTS = 30
MOST_LISTENERS = 256


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


def observed(doors: Doors) -> Observe:
    """An `Observe`, beside whoever knows all front doors."""

    async def observe(question: Question, whole: bool) -> Seen:
        records = await doors.look(question)
        if not whole:
            return Seen(records)
        deployment = await doors.deployment() if doors.deployment is not None else None
        table = instances(doors.table)["instances"]
        return Seen(records, msgspec.json.encode(deployment), msgspec.json.encode(table))

    return observe


class Events:
    """Of one process, in its event loop."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._listeners: Counter[str] = Counter()
        self._looks: dict[str, tuple[float, asyncio.Task[dict[str, bytes]]]] = {}
        self._ended = asyncio.Event()

    def check_room(self) -> None:
        """Raises OverloadedError: too many listen already."""
        if self._listeners.total() >= MOST_LISTENERS:
            raise OverloadedError(f"{MOST_LISTENERS} pages watch already; close one")

    async def watch(self, tenant: str) -> AsyncGenerator[bytes, None]:
        """Events for one listener, until `end`. `tenant`: whose requests alone it is told of, or ""."""
        told: dict[str, bytes] = {}
        self._listeners[tenant] += 1
        try:
            while not self._ended.is_set():
                at, parts = await self._parts(tenant)
                news = {name: part for name, part in parts.items() if told.get(name) != part}
                told |= news
                news["tick"] = msgspec.json.encode({"at": round(time.time(), 3)})
                yield b"".join(b"event: %b\ndata: %b\n\n" % (name.encode(), part) for name, part in news.items())
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(at + EVERY_S):
                        await self._ended.wait()
        except asyncio.CancelledError:
            if not self._ended.is_set():  # else it is what all wait for that was cancelled
                raise
        finally:
            self._listeners[tenant] -= 1
            if not self._listeners[tenant] and tenant in self._looks:
                self._looks.pop(tenant)[1].cancel()

    def end(self) -> None:
        """Nobody is told any more; every listener's stream ends."""
        self._ended.set()
        for _, look in self._looks.values():
            look.cancel()

    async def _parts(self, tenant: str) -> tuple[float, dict[str, bytes]]:
        """What there is, no older than a second, and since when; whoever else watches has the same."""
        now = asyncio.get_running_loop().time()
        at, look = self._looks.get(tenant, (now - EVERY_S, None))
        if look is None or (look.done() and (look.exception() is not None or now - at >= EVERY_S)):
            at, look = self._looks[tenant] = now, asyncio.create_task(self._look(tenant), name="page")
        return at, await asyncio.shield(look)

    async def _look(self, tenant: str) -> dict[str, bytes]:
        """What there is, by the name of its event; of what cannot be had, why."""
        question = Question(limit=REQUESTS, window_s=MINUTE_S, tenant=tenant)
        try:
            async with asyncio.timeout(LOOK_S):
                seen = await self._observe(question, True)
        except TimeoutError:
            return {"trouble": msgspec.json.encode(f"nobody has answered within {LOOK_S:.0f} s")}
        except EpdError as error:
            return {"trouble": msgspec.json.encode(error.message)}
        return {
            "trouble": b'""',
            "deployment": seen.deployment,
            "instances": seen.instances,
            "rates": msgspec.json.encode((seen.records.counts or Counts()).summary()),
            "requests": msgspec.json.encode(seen.records.requests),
        }
