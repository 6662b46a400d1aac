"""The live line of a run: on a terminal only, and never in a file or a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import TextIO

from bench.clients.sender import Run

EVERY_S = 0.5
RECENT = 50
"""Answers that the line's median is of."""


def line(run: Run, now_s: float) -> str:
    """How the run stands."""
    recent = [record.ttft_s for record in run.rows[-RECENT:] if record.ok and record.ttft_s is not None]
    waits = f"TTFT {statistics.median(recent) * 1e3:.0f} ms" if recent else "no first token yet"
    good = sum(record.ok for record in run.rows)
    return (
        f"{run.label}  {now_s - run.begun_s:.0f} s  sent {run.sent}  under way {run.under_way}  "
        f"ok {good}  not ok {len(run.rows) - good}  {waits}"
    )


@contextlib.asynccontextmanager
async def live_line(run: Run, out: TextIO | None) -> AsyncIterator[None]:
    """Show the line on `out` while the context lasts, and take it away again. Nowhere where `out` is None."""
    if out is None or not out.isatty():
        yield
        return

    async def show() -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            print(f"\r\x1b[K{line(run, time.perf_counter())}", end="", file=out, flush=True)

    task = asyncio.create_task(show())
    try:
        yield
    finally:
        task.cancel()
        print("\r\x1b[K", end="", file=out, flush=True)
