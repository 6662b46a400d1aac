"""All of a change in advance: for a look before anything is touched, and to refuse what would get stuck midway."""

from __future__ import annotations

from dataclasses import replace

from deploy.change.match import given_up
from deploy.change.types import (
    Action,
    Actual,
    Drain,
    Flip,
    Leave,
    Pause,
    Plan,
    Resume,
    Shortage,
    Start,
    Wanted,
)
from deploy.change.wave import reached, wave
from deploy.runtime.protocol import Observed, Order, Phase


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


def carried_out(action: Action, actual: Actual) -> Actual:
    """The world as it is right after an action was begun."""
    if isinstance(action, Pause | Resume):
        return replace(actual, paused=isinstance(action, Pause))
    if isinstance(action, Leave):
        return replace(actual, leaving=actual.leaving | {action.id})
    there = {one.order.id: one for one in actual.instances}
    one = there.get(action.id)
    if isinstance(action, Start):
        order = Order(action.id, action.spec)
        there[action.id] = Observed(order, Phase.STARTING) if one is None else replace(one, order=order, phase=Phase.UP)
        return replace(actual, instances=tuple(there.values()), empty=actual.empty - {action.id})
    assert one is not None, f"{action} of an instance that is not there"
    if isinstance(action, Flip):
        order = Order(action.id, replace(one.order.spec, role=action.role))
        there[action.id] = replace(one, order=order)
        gone = frozenset({action.id})
        return replace(
            actual, instances=tuple(there.values()), leaving=actual.leaving - gone, quiet=actual.quiet - gone
        )
    phase = Phase.DRAINING if isinstance(action, Drain) else Phase.STOPPING
    there[action.id] = replace(one, phase=phase)
    return replace(actual, instances=tuple(there.values()))


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
    return one.phase is Phase.STARTING or (one.phase is Phase.DOWN and not given_up(one))
