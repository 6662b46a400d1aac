"""What the stages announce, put where it is needed: features into the directory, reports into the status table, causes
to the requests that failed of them. Owns none of it being true: announcements get lost.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict

from epd_serve.wire import (
    Announcement,
    CacheReport,
    FeatureExpected,
    FeatureFailed,
    FeatureMissing,
    FeaturePending,
    FeatureReady,
    KvReport,
    StageReport,
    StoreReport,
)
from proxy.background import Background
from proxy.metrics import Metrics
from proxy.registry.announcements import Announcements
from proxy.registry.feature_directory import FeatureDirectory
from proxy.registry.table import InstanceTable

MISSING_WAIT_S = 0.05


class AnnouncementDispatcher:
    """Everything that reaches this proxy without having been asked for. `key_file`: as of `Announcements`."""

    def __init__(
        self,
        table: InstanceTable,
        directory: FeatureDirectory,
        metrics: Metrics,
        background: Background,
        key_file: str = "",
    ) -> None:
        self.directory = directory
        self._table = table
        self._metrics = metrics
        self._missing = MissingFeatures()
        self._announcements = Announcements(table, self.dispatch, background, key_file)

    def start(self) -> None:
        """Begin to listen, in the running event loop."""
        self._announcements.start()

    async def stop(self) -> None:
        await self._announcements.stop()

    @property
    def listening(self) -> bool:
        """Whether a consumer's word about a missing feature would be heard."""
        return self._announcements.listening

    def dispatch(self, message: Announcement) -> None:
        """Take in one announcement."""
        self._metrics.announcements.labels(type(message).__name__).inc()
        match message:
            case FeatureExpected():
                self.directory.expected(message, time.monotonic())
            case FeatureReady():
                self._metrics.encoded_once.announced(message.key, time.monotonic())
                self.directory.announced(message, time.monotonic())
            case FeatureFailed():
                self._metrics.encoded_once.lost([message.key])
                self.directory.lost([message.key])
            case FeatureMissing():
                self._metrics.encoded_once.lost(message.keys)
                self.directory.lost(message.keys)
                self._missing.announced(message)
            case StoreReport():
                self._table.report(message)
            case KvReport():
                self._table.report_kv(message)
            case StageReport():
                self._table.report_stage(message)
            case CacheReport():
                if self._table.report_cache(message):
                    self._announcements.ask_whole(message.instance)
            case FeaturePending():
                self.directory.renewed(message.keys, time.monotonic())

    async def missing_for(self, request_id: str) -> FeatureMissing | None:
        """What a consumer said about a request that has just failed. It may be a moment behind the failure."""
        return await self._missing.of(request_id, timeout_s=MISSING_WAIT_S if self.listening else 0.0)


LIMIT = 1024
_OUR_ID = re.compile(r"[0-9a-f]{32}")


class MissingFeatures:
    """Why requests failed for want of a feature: announced causes by the proxy's id of the request.

    A consumer announces `FeatureMissing` before it fails the request, but on another connection: the failure may be
    here first. Lives in one event loop.

    Args:
        limit: the oldest goes when more are kept.
    """

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
