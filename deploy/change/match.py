"""Which instances may stay as they are for a wanted layout, what is too much and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    free = [one for one in present if not given_up(one)]
    left = list(wanted.specs)
    kept: dict[str, Spec] = {}
    for drains, exact in ((False, True), (True, True), (False, False), (True, False)):
        for spec in tuple(left):
            found = _first(free, spec, drains=drains, fits=_exactly if exact else Spec.stands_for)
            if found is not None:
                free.remove(found)
                left.remove(spec)
                kept[found.order.id] = spec
    return Match(kept, tuple(one for one in present if one.order.id not in kept), tuple(left))


def given_up(one: Observed) -> bool:
    """It has ended and nobody starts it again: it never answered, or it was draining."""
    return one.over


def _first(
    free: Sequence[Observed], spec: Spec, *, drains: bool, fits: Callable[[Spec, Spec], bool]
) -> Observed | None:
    those = (one for one in free if (one.phase is Phase.DRAINING) is drains and fits(one.order.spec, spec))
    return min(those, key=lambda one: one.phase is not Phase.UP, default=None)


def _exactly(one: Spec, other: Spec) -> bool:
    return one == other
