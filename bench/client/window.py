"""The steady part of a run: without its beginning, when caches and batches fill, and without its end, when they drain.

A request belongs to the window when it was *due* in it, however long it took; so a slow answer is not lost at the edge.
Throughput counts the tokens that *came* within the window, whoever's they are: the drain tail counts nothing, and a
server that falls behind shows it. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client.row import Row
from bench.client.slo import counted

WARM_UP_SHARE = 0.1
"""Of the time in which requests were issued, where nobody says how long the warm-up is."""
GROWTH = 2.0
"""More than so many times the requests under way at the window's end than at its begin: no steady state."""
FEW = 8
"""Requests under way of which the growth says nothing."""


@dataclass(frozen=True, slots=True)
class Window:
    """From `begin_s` until `end_s`, both CLOCK_MONOTONIC seconds."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    def due(self, rows: Sequence[Row]) -> list[Row]:
        """The requests that count."""
        return [row for row in rows if self.begin_s <= row.due_s <= self.end_s]

    def tokens(self, rows: Sequence[Row]) -> float:
        """Output tokens of `rows` that came within the window. Of an event that carries several, its share."""
        found = 0.0
        for row in rows:
            if row.token_s:
                inside = sum(self.begin_s <= at <= self.end_s for at in row.token_s)
                found += inside * row.output_tokens / len(row.token_s)
        return found

    def under_way(self, rows: Sequence[Row], at_s: float) -> int:
        """Requests that were due and had not ended."""
        return sum(row.due_s <= at_s < row.ended_s for row in rows)

    def grows(self, rows: Sequence[Row]) -> str:
        """Why this is no steady state: more and more requests wait. "" where it is one, as far as can be seen."""
        thirds = [self.begin_s + self.length_s * part for part in (1 / 6, 5 / 6)]
        before, after = (self.under_way(rows, at) for at in thirds)
        waits = [row for row in self.due(counted(rows)) if row.ttft_s is not None]
        waits.sort(key=lambda row: row.due_s)
        third = len(waits) // 3
        if after <= FEW or after <= GROWTH * before or third == 0:
            return ""
        first, last = (statistics.median(row.ttft_s or 0.0 for row in part) for part in (waits[:third], waits[-third:]))
        if last <= GROWTH * first:
            return ""
        return (
            f"requests under way grew from {before} to {after}, the median TTFT from {first * 1e3:.0f} to "
            f"{last * 1e3:.0f} ms: more was asked than is served, so the figures depend on how long the run was"
        )


def steady_window(begun_s: float, issued_s: float, warm_up_s: float | None) -> Window:
    """Of a run that began at `begun_s` and whose last request was due at `issued_s`."""
    warm_up = WARM_UP_SHARE * (issued_s - begun_s) if warm_up_s is None else warm_up_s
    return Window(min(begun_s + warm_up, issued_s), issued_s)
