"""What a check says: one thing that was looked at, how it is, why that matters, and what to do. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """`ERROR`: a start is futile, or serves wrongly. `WARNING`: it works, slower or not always."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        check: its name, unique per thing looked at: `cann`, `device 3`.
        seen: what was found, short.
        why: why it matters; "" where all is well.
        fix: what to do about it, a command where one does it; "" where all is well.
        stops: a start makes no sense, so `serve` refuses it, too (`deploy/doctor/preflight.py`).
    """

    check: str
    level: Level
    seen: str
    why: str = ""
    fix: str = ""
    stops: bool = False


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Level.OK, seen)


def warning(check: str, seen: str, why: str, fix: str) -> Finding:
    return Finding(check, Level.WARNING, seen, why, fix)


def error(check: str, seen: str, why: str, fix: str, *, stops: bool = False) -> Finding:
    return Finding(check, Level.ERROR, seen, why, fix, stops)
