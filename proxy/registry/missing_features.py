"""Why requests failed for want of a feature: what consumers announced, kept for those who ask a moment later.

A consumer announces `FeatureMissing` before it fails the request, but on another connection: the failure may be here
first. Bounded; lives in one event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict

from epd_serve.wire import FeatureMissing

LIMIT = 1024
_OUR_ID = re.compile(r"[0-9a-f]{32}")


class MissingFeatures:
    """Announced causes by the proxy's id of the request. `limit`: the oldest goes when more are kept."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._events: OrderedDict[str, FeatureMissing] = OrderedDict()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def announced(self, event: FeatureMissing) -> None:
        """Keep what a consumer said. Stages lengthen the id that we gave them; ours is still in it."""
        match = _OUR_ID.search(event.request_id)
        ours = match.group() if match else event.request_id
        self._events[ours] = event
        if len(self._events) > self._limit:
            self._events.popitem(last=False)
        if (waiter := self._waiting.get(ours)) is not None and not waiter.done():
            waiter.set_result(None)

    async def of(self, request_id: str, *, timeout_s: float) -> FeatureMissing | None:
        """What was announced for this request, now or within `timeout_s`. Each announcement is given out once."""
        if request_id not in self._events and timeout_s > 0:
            waiter = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait([waiter], timeout=timeout_s)
            finally:
                del self._waiting[request_id]
        return self._events.pop(request_id, None)
