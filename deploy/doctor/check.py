"""What the doctor's tables are made of. A check looks at one thing; the first of its verdicts that holds is shown."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from deploy.doctor.facts import Facts


class Level(enum.StrEnum):
    """`ERROR`: a start is futile, or serves wrongly. `WARNING`: it works, slower or not always."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


OK, WARNING, ERROR = Level


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


@dataclass(frozen=True)
class Verdict:
    """What is said of the thing looked at. Texts are as of `Finding`, and templates (`str.format`): `one` in them is
    that thing, `facts` are all facts.

    Attributes:
        when: the field of that thing that has to be true for it, or `not` and the one that must not; "": always.
    """

    level: Level
    seen: str
    why: str = ""
    fix: str = ""
    when: str = ""
    stops: bool = False

    def holds(self, one: object) -> bool:
        negated, _, field = self.when.rpartition(" ")
        return not field or bool(attrgetter(field)(one)) is not bool(negated)


@dataclass(frozen=True)
class Check:
    """
    Attributes:
        name: a template, too.
        of: the things that are looked at, one finding each at most; the facts as a whole if not given.
        on: kinds of device where it is looked at.
    """

    name: str
    verdicts: tuple[Verdict, ...]
    of: Callable[[Facts], Iterable[Any]] = lambda facts: (facts,)
    on: tuple[str, ...] = ("cpu", "cuda", "npu")

    def findings(self, facts: Facts) -> Iterator[Finding]:
        for one in self.of(facts) if facts.wanted.device in self.on else ():
            for verdict in self.verdicts:
                if verdict.holds(one):
                    texts = (self.name, verdict.seen, verdict.why, verdict.fix)
                    name, seen, why, fix = (text.format(one=one, facts=facts) for text in texts)
                    yield Finding(name, verdict.level, seen, why, fix, verdict.stops)
                    break
