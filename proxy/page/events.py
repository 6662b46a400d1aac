"""What the page is told every second, as server-sent events: made once however many watch, and not while nobody does.

A part of it is sent when it has changed, whole; a new listener gets all parts first. One that does not read is not
waited for: when it reads again it gets what is so then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec

from epd_serve.errors import EpdError, OverloadedError
from proxy.page.observed import Observe
from proxy.records.minute import MINUTE_S, Counts
from proxy.records.records import Question

EVERY_S = 1.0
LOOK_S = 8.0
"""How long what there is to tell may take to be found out; after that it is told that it cannot."""

REQUESTS = 30
MOST_LISTENERS = 256


class Events:
    """Of one process, in its event loop."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._channels: dict[str, _Channel] = {}
        self._ended = False

    def check_room(self) -> None:
        """Raises OverloadedError: too many listen already."""
        if sum(channel.listeners for channel in self._channels.values()) >= MOST_LISTENERS:
            raise OverloadedError(f"{MOST_LISTENERS} pages watch already; close one")

    async def watch(self, tenant: str) -> AsyncGenerator[bytes, None]:
        """Events for one listener, until `end`. `tenant`: whose requests alone it is told of, or ""."""
        channel = self._channels.get(tenant)
        if channel is None:
            channel = self._channels[tenant] = _Channel(self._observe, tenant)
        channel.listeners += 1
        seen = 0
        try:
            while not self._ended and await channel.after(seen):
                frames = channel.frames(seen)
                seen = channel.number
                yield frames
        finally:
            channel.listeners -= 1
            if not channel.listeners:
                channel.close()
                if self._channels.get(tenant) is channel:
                    del self._channels[tenant]

    def end(self) -> None:
        """Nobody is told any more; every listener's stream ends."""
        self._ended = True
        for channel in self._channels.values():
            channel.close()


class _Channel:
    """Those who are told the same.

    Attributes:
        number: of the last round. listeners: how many there are.
    """

    def __init__(self, observe: Observe, tenant: str) -> None:
        self.number = self.listeners = 0
        self._observe = observe
        self._question = Question(limit=REQUESTS, window_s=MINUTE_S, tenant=tenant)
        self._parts: dict[str, tuple[int, bytes]] = {}  # the round in which it changed, and its event
        self._tick = b""
        self._turn = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="page")
        self._task.add_done_callback(lambda _: self._turn.set())

    async def after(self, seen: int) -> bool:
        """Wait until there is more than the round `seen`. False: there will not be. Raises what has ended it."""
        while self.number <= seen:
            if self._task.done():
                if not self._task.cancelled():
                    self._task.result()
                return False
            await self._turn.wait()
        return True

    def frames(self, seen: int) -> bytes:
        """All that has changed after the round `seen`."""
        return b"".join(frame for number, frame in self._parts.values() if number > seen) + self._tick

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            parts = await self._look()
            self.number += 1
            for name, told in parts.items():
                frame = _event(name, told)
                if name not in self._parts or self._parts[name][1] != frame:
                    self._parts[name] = self.number, frame
            self._tick = _event("tick", msgspec.json.encode({"at": round(time.time(), 3)}))
            turn, self._turn = self._turn, asyncio.Event()
            turn.set()
            await asyncio.sleep(max(0.0, began + EVERY_S - loop.time()))

    async def _look(self) -> dict[str, bytes]:
        """What there is, by the name of its event; of what cannot be had, why."""
        try:
            async with asyncio.timeout(LOOK_S):
                seen = await self._observe(self._question, True)
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


def _event(name: str, told: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), told)
