"""What requests hold of each incarnation of each instance: a seam, so that several proxy processes can count as one.

Only ever grows: acquired and released are counted apart, so that a process that shares its counts writes cells of its
own, and "since then" is a difference. What a weight means, and how loads follow from it, is `proxy/registry/load.py`'s
business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from epd_serve.instances import IncarnationId

PER_UNIT = 1000
"""Weights are counted in thousandths, as integers: sums stay exact however long an incarnation is."""


class Work(StrEnum):
    """Kinds of work that a request asks of an instance."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Tally(NamedTuple):
    """Counts of one kind of work on one incarnation since it is known; weights in thousandths of a unit."""

    acquired: int = 0
    released: int = 0
    acquired_weight: int = 0
    released_weight: int = 0

    @property
    def held(self) -> int:
        return self.acquired - self.released

    @property
    def held_weight(self) -> int:
        return self.acquired_weight - self.released_weight


NO_TALLY = Tally()
NOTHING: Mapping[Work, Tally] = dict.fromkeys(Work, NO_TALLY)


def total_of(tallies: Iterable[Tally]) -> Tally:
    """All of them together; of at least one."""
    return Tally(*map(sum, zip(*tallies, strict=True)))


class Ledger(Protocol):
    """Counts of leases. Called from one thread of a process; none of it waits."""

    def acquire(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        """This process has given `incarnation_id` one more piece of `work`; weight >= 0."""

    def release(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        """One that this process acquired has ended, with the weight it was acquired with."""

    def tallies(self, incarnation_id: IncarnationId) -> Mapping[Work, Tally]:
        """Returns the counts of all processes that share this ledger; every `Work` is in it. Unknown incarnations have
        held nothing."""

    def total(self, incarnation_id: IncarnationId) -> Tally:
        """Returns the same of all kinds of work together."""

    def forget(self, incarnation_id: IncarnationId) -> None:
        """Nothing is held of `incarnation_id` any more, by anybody, and this process will not acquire there again."""


class OwnLedger:
    """The ledger of a proxy that is alone."""

    def __init__(self) -> None:
        self._tallies: dict[IncarnationId, dict[Work, Tally]] = {}

    def acquire(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        old = self._of(incarnation_id)[work]
        self._tallies[incarnation_id][work] = Tally(
            old.acquired + 1, old.released, old.acquired_weight + weight, old.released_weight
        )

    def release(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        old = self._of(incarnation_id)[work]
        assert old.held > 0 and old.held_weight >= weight, f"released more {work} of {incarnation_id} than was acquired"
        self._tallies[incarnation_id][work] = Tally(
            old.acquired, old.released + 1, old.acquired_weight, old.released_weight + weight
        )

    def tallies(self, incarnation_id: IncarnationId) -> Mapping[Work, Tally]:
        return self._tallies.get(incarnation_id, NOTHING)

    def total(self, incarnation_id: IncarnationId) -> Tally:
        tallies = self._tallies.get(incarnation_id)
        return NO_TALLY if tallies is None else total_of(tallies.values())

    def forget(self, incarnation_id: IncarnationId) -> None:
        self._tallies.pop(incarnation_id, None)

    def _of(self, incarnation_id: IncarnationId) -> dict[Work, Tally]:
        return self._tallies.setdefault(incarnation_id, dict(NOTHING))
