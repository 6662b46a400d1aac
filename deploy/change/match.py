"""Which instances may stay as they are for a wanted layout, what is too much and what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deploy.change.types import Wanted
from deploy.runtime.protocol import Observed, Phase, Spec


@dataclass(frozen=True)
class Match:
    """Attributes:
    kept: the spec that each instance is to have, by id.
    surplus: instances that stand for nothing wanted. missing: wanted specs that nobody stands for.
    """

    kept: dict[str, Spec]
    surplus: tuple[Observed, ...]
    missing: tuple[Spec, ...]


def match(wanted: Wanted, instances: Iterable[Observed]) -> Match:
    """Each wanted spec gets one instance: rather of its very role than by a flip, rather one that serves than one that
    drains. One that is being stopped, or that was given up, stands for nothing; the latter is surplus."""
    present = [one for one in instances if one.phase is not Phase.STOPPING]
    pairs = sorted(
        (one.order.spec != spec, one.phase is Phase.DRAINING, at, one.phase is not Phase.UP, number)
        for at, spec in enumerate(wanted.specs)
        for number, one in enumerate(present)
        if not one.over and one.order.spec.stands_for(spec)
    )
    taken: dict[int, int] = {}
    for *_, at, _, number in pairs:
        if at not in taken.values() and number not in taken:
            taken[number] = at
    return Match(
        kept={present[number].order.id: wanted.specs[at] for number, at in taken.items()},
        surplus=tuple(one for number, one in enumerate(present) if number not in taken),
        missing=tuple(spec for at, spec in enumerate(wanted.specs) if at not in taken.values()),
    )
