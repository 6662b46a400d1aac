"""A part of `epd-bench proxy`: what it should measure, and how."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.goals import Goal
from bench.micro.measurement import Row


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        what: a line of the help.
        measure, figures, tables, goals: as of a `Measurement`, of this part's rows.
        fetch: brings what it needs from elsewhere, before any part measures; raises StageError, which says what to give
            instead.
    """

    what: str
    measure: Callable[[argparse.Namespace], Iterable[Row]]
    tables: Callable[[Sequence[Row]], Iterable[str]]
    figures: Callable[[Sequence[Row]], dict[str, float]] = lambda rows: {}
    goals: tuple[Goal, ...] = ()
    fetch: Callable[[argparse.Namespace], None] = lambda arguments: None
