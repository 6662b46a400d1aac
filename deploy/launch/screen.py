"""Live progress, one line per stage: redrawn in place on a terminal, one line per change elsewhere (logs, CI).

What is shown of the instances follows from how their runtime sees them (`StageNews`). `Screen` is where it is shown; a
deployment on many machines keeps it for terminals elsewhere (`deploy/ray/news.py`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from deploy.runtime.protocol import Observed, Runtime
from epd_serve.errors import StageError
from epd_serve.instances import Instance


class Shown(Protocol):
    """What is told of instances and of the deployment, as `Screen` shows it."""

    def open(self, stages: Sequence[str]) -> None: ...

    def close(self) -> None: ...

    def tick(self) -> None: ...

    def row(self, stage: str, text: str, running: bool) -> None:
        """How an instance is, in a few words. `running`: it starts, and its seconds are counted."""

    def gone(self, stage: str) -> None: ...

    def line(self, text: str) -> None: ...


class StageNews:
    """Shows what a runtime sees of the instances.

    Args:
        first: ids of the instances that the launch begins with; none where it began before this process did, and
            nothing is news that is so from the start.

    Attributes:
        all_up: set when each of them has answered once, or what there is is known.
        seen: all instances, by id.
    """

    def __init__(self, screen: Shown, first: Iterable[str]) -> None:
        self.all_up = asyncio.Event()
        self.seen: Mapping[str, Observed] = {}
        self._screen = screen
        self._missing = set(first)
        self._silent = not self._missing
        self._shown: dict[str, tuple[int, str]] = {}

    def instances(self) -> dict[str, Instance]:
        """What is told of their present lives."""
        return {name: one.instance for name, one in self.seen.items() if one.instance is not None}

    async def follow(self, runtime: Runtime) -> None:
        """Until cancelled.

        Raises:
            StageError: a first start failed, before all had answered.
        """
        async for item in runtime.watch():
            was, self.seen = self.seen, {one.order.id: one for one in item}
            for gone in was.keys() - self.seen.keys():
                self._shown.pop(gone, None)
                self._screen.gone(gone)
            for one in item:
                self._show(one)
            self._silent = False
            self._missing -= {name for name, one in self.seen.items() if one.ever_up}
            if not self._missing:
                self.all_up.set()

    def _show(self, one: Observed) -> None:
        name, text = one.order.id, _text(one)
        if one.over and name in self._missing:
            raise StageError(f"stage {name} did not start: {one.reason}", stage=name)
        if text and self._shown.get(name) != (one.restarts, text):
            self._shown[name] = one.restarts, text
            if not self._silent:
                self._screen.row(name, text, bool(one.progress))


def _text(one: Observed) -> str:
    """How it is; "" where it is on its way from one state to another."""
    if one.over:
        return f"is not started again: {one.reason}"
    if one.retry_in_s is not None:
        return f"down: {one.reason}; restart in {one.retry_in_s:.0f} s"
    return f"ready in {one.start_s:.1f} s" if one.serves else one.progress


@dataclass
class _Row:
    text: str = "waiting for its turn"
    since: float = 0.0
    running: bool = False


class Screen:
    """Shows what it is told. Between `open` and `close` a terminal's rows are redrawn by every call and `tick`."""

    def __init__(self, out: TextIO, *, terminal: bool) -> None:
        self._out = out
        self._terminal = terminal
        self._rows: dict[str, _Row] = {}
        self._drawn = 0
        self._live = False

    def open(self, stages: Sequence[str]) -> None:
        self._rows = {stage: _Row() for stage in stages}
        self._live = self._terminal
        self._draw()

    def close(self) -> None:
        """Leave the rows as they are; later news are plain lines."""
        self._draw()
        self._live = False
        self._drawn = 0

    def tick(self) -> None:
        """Redraw the elapsed seconds."""
        self._draw()

    def row(self, stage: str, text: str, running: bool) -> None:
        row = self._rows.setdefault(stage, _Row())
        if running and not row.running:
            row.since = time.monotonic()
        row.text, row.running = text, running
        if self._live:
            self._draw()
        else:
            elapsed = f" ({time.monotonic() - row.since:.1f} s)" if running else ""
            self._out.write(f"[{stage}] {text}{elapsed}\n")
            self._out.flush()

    def gone(self, stage: str) -> None:
        """It is no part of the deployment any more."""
        if self._rows.pop(stage, None) is not None:
            self.line(f"[{stage}] gone")

    def line(self, text: str) -> None:
        """A line of its own, above the rows."""
        if self._live and self._drawn:
            self._out.write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0
        self._out.write(text + "\n")
        self._draw()
        self._out.flush()

    def _draw(self) -> None:
        if not self._live:
            return
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        now = time.monotonic()
        width = shutil.get_terminal_size().columns - 1  # a wrapped row could not be drawn over
        lines = []
        for stage, row in self._rows.items():
            elapsed = f" {now - row.since:.0f} s" if row.running else ""
            lines.append("\x1b[2K" + f"  {stage:<5} {row.text}{elapsed}"[:width])
        self._out.write(up + "\n".join(lines) + "\n")
        self._out.flush()
        self._drawn = len(lines)
