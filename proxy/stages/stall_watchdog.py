"""Watches attempts that another one could follow: cancels those of which an instance has stopped to report, or does not
answer on /health any more.

A stage that hangs, or whose host has gone, keeps its connections open, so nothing else ends such a wait before its
deadline. One look a second over all of them, since an instance falls silent without any news.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from epd_serve.errors import StageError
from proxy.background import Background
from proxy.errors import StageDied
from proxy.registry.table import InstanceTable
from proxy.request.cancel_scope import CancelScope
from proxy.request.client_sink import ClientSink
from proxy.stages.circuits import StageCall

CHECK_EVERY_S = 1.0


class StallWatchdog:
    """One per process, in its event loop.

    Args:
        silence_s: for how long an instance that reports may say nothing while others do, and any be said to be down.
        background: takes what goes wrong in a look; the next one follows all the same.
    """

    def __init__(self, table: InstanceTable, silence_s: float, background: Background) -> None:
        self._table = table
        self._silence_s = silence_s
        self._background = background
        self._watched: dict[CancelScope[StageError], tuple[ClientSink, Sequence[StageCall]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, cancel_scope: CancelScope[StageError], sink: ClientSink, calls: Sequence[StageCall]) -> None:
        """An attempt makes these calls, until `unwatch`: cancel it, while another one could follow, with the error
        about a silent one. Once the last of these calls is answered, nothing hangs on the others."""
        self._watched[cancel_scope] = (sink, calls)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    def unwatch(self, cancel_scope: CancelScope[StageError]) -> None:
        self._watched.pop(cancel_scope, None)

    def _check(self) -> None:
        self._timer = None
        for cancel_scope, (sink, calls) in self._watched.items():
            if sink.repeatable:
                with self._background.handling("look at a stage"):
                    self._judge(cancel_scope, calls)
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    def _judge(self, cancel_scope: CancelScope[StageError], calls: Sequence[StageCall]) -> None:
        for call in calls[-1:] if calls[-1].judged else calls:
            if call.ended:
                continue
            stage, silent_s = call.incarnation_id[0], self._table.silence_s(*call.incarnation_id)
            down_s = self._table.down_s(*call.incarnation_id)
            if max(silent_s, down_s) > self._silence_s:
                call.failed()
                what = "has stopped to report" if silent_s > self._silence_s else "is down"
                ago_s = max(silent_s, down_s) if down_s < math.inf else 0.0
                cancel_scope.cancel(StageDied(f"stage {stage} {what}", stage=stage, ago_s=ago_s))
