"""Whether a run says anything about the server: the reasons why it does not. Pure.

Refusals (429, 503) are what an overloaded server is meant to do: they are misses, not a run gone wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.client.metrics import faults
from bench.client.row import Row
from bench.client.run import Run
from bench.client.slo import counted
from bench.client.verdict import CROWDED, REFUSALS
from bench.client.window import Window


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run has to keep to.

    Attributes:
        min_samples: whole answers in the window; of fewer a percentile is one request's luck.
        late_ms: by which the generator may come late to requests; more so to one of them, or to one in a hundred: a
            single hiccup is no overload. Its own delay is charged to the server.
        max_failed: share of requests that may fail otherwise than by a refusal.
    """

    min_samples: int = 10
    late_ms: float = 25.0
    max_failed: float = 0.1


@dataclass(frozen=True, slots=True)
class Objection:
    """A reason why a run is not valid.

    Attributes:
        whose: `end`: it was ended early. `generator`: the measuring is at fault. `answers`: what came is too little, or
            too bad, to be measured; a search for the goodput takes that for a miss.
    """

    whose: Literal["end", "generator", "answers"]
    text: str


def objections(run: Run, window: Window, rules: Rules) -> list[Objection]:
    """Why the run is not valid; empty when it is."""
    rows = window.due(run.rows)
    found = [Objection("end", run.stopped)] if run.stopped else []
    if not any(row.ok for row in run.rows):
        none = f"not one good answer among {len(run.rows)} requests{_why(run.rows)}"
        return [*found, Objection("answers", none)]
    good = sum(row.ok for row in rows)
    if good < rules.min_samples:
        few = (
            f"{good} good answers in the window of {window.length_s:.1f} s, {rules.min_samples} are needed: run longer"
        )
        found.append(Objection("answers", few))
    about = counted(rows)
    failed = [row for row in about if not row.ok and row.fault not in REFUSALS]
    if len(failed) > rules.max_failed * len(about):
        found.append(Objection("answers", f"{len(failed)} of {len(about)} requests failed{_why(failed)}"))
    late = sorted((row.late_s * 1e3 for row in run.rows if row.late_s * 1e3 > rules.late_ms), reverse=True)
    if len(late) > max(1, len(run.rows) // 100):
        text = (
            f"the generator came up to {late[0]:.0f} ms late to {len(late)} of {len(run.rows)} requests, "
            f"{rules.late_ms:g} are allowed: it is overloaded, or starved of CPU by what runs beside it"
        )
        found.append(Objection("generator", text))
    if crowded := sum(row.fault == CROWDED for row in run.rows):
        found.append(Objection("generator", f"{crowded} requests were not sent, since too many were under way"))
    return found


def _why(rows: Sequence[Row]) -> str:
    """What went wrong most often, with what was said."""
    kinds = faults(rows)
    if not kinds:
        return ""
    worst = next(iter(kinds))
    said = next(row.error for row in rows if row.fault == worst)
    return f": {', '.join(f'{count} × {kind}' for kind, count in kinds.items())}; {worst}: {said}"
