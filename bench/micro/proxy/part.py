"""A part of `epd-bench proxy`: what it is called, what it should measure, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.goals import Goal


@dataclass(frozen=True)
class Options:
    """What the command line says to every part.

    Attributes:
        quick: cut the time, not the kinds of measurement.
        peer_vllm, peer_ascend: copies of the peers' example proxies; None has them fetched.
    """

    quick: bool = False
    peer_vllm: Path | None = None
    peer_ascend: Path | None = None


@dataclass(frozen=True)
class PartResult:
    """What a part has measured. `text` is printed; figures and rows go into the result (`bench/record.py`)."""

    figures: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] = ()
    text: str = ""


@dataclass(frozen=True)
class Part:
    """`name` is a value of `--only`; `what` one line of its help; `goals` of the figures that `measure` returns.

    `fetch` brings what the part needs from elsewhere, before any part measures; it raises StageError, which says what
    to give instead.
    """

    name: str
    what: str
    measure: Callable[[Options], PartResult] = field(compare=False)
    goals: tuple[Goal, ...] = ()
    fetch: Callable[[Options], None] = field(compare=False, default=lambda options: None)
