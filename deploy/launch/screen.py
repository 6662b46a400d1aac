"""Live progress, one line per stage: redrawn in place on a terminal, one line per change elsewhere (logs, CI)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO


class Shown(Protocol):
    """What is told of instances and of the deployment, as `Screen` shows it."""

    def open(self, stages: Sequence[str]) -> None: ...

    def close(self) -> None: ...

    def tick(self) -> None: ...

    def started(self, stage: str) -> None: ...

    def phase(self, stage: str, phase: str) -> None: ...

    def up(self, stage: str, seconds: float) -> None: ...

    def down(self, stage: str, reason: str, retry_in_s: float) -> None: ...

    def over(self, stage: str, reason: str) -> None: ...

    def gone(self, stage: str) -> None: ...

    def line(self, text: str) -> None: ...


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

    def started(self, stage: str) -> None:
        self._set(stage, _Row("starting", time.monotonic(), running=True), quiet=True)

    def phase(self, stage: str, phase: str) -> None:
        row = self._row(stage)
        if row.text != phase:
            self._set(stage, _Row(phase, row.since, running=True))

    def up(self, stage: str, seconds: float) -> None:
        self._set(stage, _Row(f"ready in {seconds:.1f} s", self._row(stage).since))

    def down(self, stage: str, reason: str, retry_in_s: float) -> None:
        self._set(stage, _Row(f"down: {reason}; restart in {retry_in_s:.0f} s", self._row(stage).since))

    def over(self, stage: str, reason: str) -> None:
        self._set(stage, _Row(f"is not started again: {reason}", self._row(stage).since))

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

    def _row(self, stage: str) -> _Row:
        return self._rows.get(stage, _Row(since=time.monotonic()))

    def _set(self, stage: str, row: _Row, *, quiet: bool = False) -> None:
        self._rows[stage] = row
        if self._live:
            self._draw()
        elif not quiet:
            elapsed = f" ({time.monotonic() - row.since:.1f} s)" if row.running else ""
            self._out.write(f"[{stage}] {row.text}{elapsed}\n")
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
