"""Looks after attempts that wait for their first byte: cuts those of which an instance has stopped to report.

A stage that hangs keeps its connections open, so nothing else ends such a wait before its deadline. One look a second
over all of them, since an instance falls silent without any news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from epd_serve.errors import StageError
from proxy.background import Background
from proxy.errors import StageDied
from proxy.registry.table import InstanceTable
from proxy.request.cancel_scope import Cut
from proxy.request.client_sink import ClientSink
from proxy.stages.circuits import StageCall

LOOK_S = 1.0


class Lookout:
    """One per process, in its event loop.

    Args:
        silence_s: for how long an instance that reports may say nothing while others do.
        background: takes what goes wrong in a look; the next one follows all the same.
    """

    def __init__(self, table: InstanceTable, silence_s: float, background: Background) -> None:
        self._table = table
        self._silence_s = silence_s
        self._background = background
        self._watched: dict[Cut[StageError], tuple[ClientSink, Sequence[StageCall]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, cut: Cut[StageError], sink: ClientSink, calls: Sequence[StageCall]) -> None:
        """An attempt makes these calls, until `unwatch`: cut it before its first byte with what is to be said of a
        silent one."""
        self._watched[cut] = (sink, calls)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def unwatch(self, cut: Cut[StageError]) -> None:
        self._watched.pop(cut, None)

    def _look(self) -> None:
        self._timer = None
        for cut, (sink, calls) in self._watched.items():
            if not sink.committed:
                with self._background.handling("look at a stage"):
                    self._judge(cut, calls)
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _judge(self, cut: Cut[StageError], calls: Sequence[StageCall]) -> None:
        for call in calls:
            silent_s = 0.0 if call.ended else self._table.silence_s(*call.life)
            if silent_s > self._silence_s:
                call.failed()
                stage = call.life[0]
                cut.now(StageDied(f"stage {stage} has stopped to report", stage=stage, ago_s=silent_s))
