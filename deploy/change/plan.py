"""All of a change in advance: for a look before anything is touched, and to refuse what would get stuck midway."""

from __future__ import annotations

from dataclasses import replace

from deploy.change.types import Action, Actual, Plan, Shortage, Wanted, carried_out
from deploy.change.wave import reached, wave
from deploy.runtime.protocol import Observed, Phase


def diff(wanted: Wanted, actual: Actual, *, may_pause: bool = False) -> Plan | Shortage:
    """The actions that lead to what is wanted if each one succeeds, wave by wave; none when it is reached.

    Returns:
        The Shortage at which the change would get stuck. Nothing should then be begun.
    """
    waves: list[tuple[Action, ...]] = []
    most = 8 * (len(wanted.specs) + len(actual.instances)) + 8
    while actual.paused or not reached(wanted, actual):
        now = wave(wanted, actual, may_pause=may_pause)
        if isinstance(now, Shortage):
            return now
        waves.append(now)
        assert len(waves) <= most, f"a change that never ends: {waves}"
        for action in now:
            actual = carried_out(action, actual)
        actual = settled(actual)
    return Plan(tuple(waves))


def settled(actual: Actual) -> Actual:
    """The world once all that was begun has ended well: what starts, or has died and is started again, is up, what
    drains is empty, what stops is gone."""
    instances = tuple(
        replace(one, phase=Phase.UP, ever_up=True) if _comes(one) else one
        for one in actual.instances
        if one.phase is not Phase.STOPPING
    )
    draining = frozenset(one.order.id for one in instances if one.phase is Phase.DRAINING)
    return replace(actual, instances=instances, empty=draining, quiet=actual.leaving)


def _comes(one: Observed) -> bool:
    return one.phase is Phase.STARTING or (one.phase is Phase.DOWN and not one.over)
