"""What the stages announce, put where it is needed: features into the directory, reports into the status table, causes
to the requests that failed of them. Owns none of it being true: announcements get lost.
"""

from __future__ import annotations

import time

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
from proxy.registry.missing_features import MissingFeatures
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
                self.directory.announced(message, time.monotonic())
            case FeatureFailed():
                self.directory.lost([message.key])
            case FeatureMissing():
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
