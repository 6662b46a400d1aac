"""When an instance that is given nothing new has nothing left: every front door has heard, no request holds it, and
its own reports say so. Whoever waits sets the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from proxy.registry.instance_state import REPORT_TRUST_S, InstanceView, Work

if TYPE_CHECKING:
    from proxy.registry.table import InstanceTable

LOOK_S = 0.02
CALM_S = 0.15
"""A change of what a report says is sent within 50 ms: what has been 0 for so long is."""


Seen = Callable[[], Awaitable[None]]
"""Returns when every living front door acts on all that was said before the call."""


async def until_empty(table: InstanceTable, seen: Seen, name: str) -> None:
    """Returns when nothing is under way on it, or it has gone.

    A request's lease ends with its answer; the KV of its prompt and an encoder's writes go on after that. So what
    counts are reports that came after the last lease had ended. One that never reports is believed after
    `REPORT_TRUST_S`.
    """
    await seen()
    while under_way(table, name):  # noqa: ASYNC110 - in memory that other processes count in
        await asyncio.sleep(LOOK_S)
    before, since = _view(table, name), time.monotonic()
    while (now := _view(table, name)) is not None and before is not None:
        if now.instance.incarnation != before.instance.incarnation:
            return  # a later life was never given anything
        silent = before.stage is None and now.stage is None and time.monotonic() > since + REPORT_TRUST_S
        if silent or _says_empty(now, before):
            return
        await asyncio.sleep(LOOK_S)


async def until_quiet(table: InstanceTable, seen: Seen, name: str) -> None:
    """Returns when no prefill is under way on it and no KV has yet to leave, or it has gone."""
    await seen()
    since = time.monotonic()
    while time.monotonic() < since + CALM_S:
        view = _view(table, name)
        if view is None:
            return
        unheard = len(view.kv) < len(view.instance.kv_news)  # whoever asks may have begun a moment ago
        if unheard or view.in_flight[Work.PREFILL] or any(report.open for report in view.kv):
            since = time.monotonic()
        await asyncio.sleep(LOOK_S)


def under_way(table: InstanceTable, name: str) -> int:
    """Requests that hold it."""
    view = _view(table, name)
    return sum(view.in_flight.values()) if view is not None else 0


def _says_empty(now: InstanceView, before: InstanceView) -> bool:
    """By reports that came since; each kind that it makes."""
    role = now.instance.role
    if now.stage is None or now.stage is before.stage or now.stage.running or now.stage.waiting:
        return False
    if now.instance.kv_news:
        old = {report.rank: report for report in before.kv}
        fresh = [report for report in now.kv if report is not old.get(report.rank)]
        if len(fresh) < len(now.instance.kv_news) or any(report.open for report in fresh):
            return False
    if role.sends_features:
        store = now.report
        return store is not None and store is not before.report and not (store.waiting_puts or store.encoding)
    return True


def _view(table: InstanceTable, name: str) -> InstanceView | None:
    return next((view for view in table.snapshot() if view.instance.id == name), None)
