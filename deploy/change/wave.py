"""The next actions of a change: all that may begin now, and never one that takes a last path or more than there is.

Asked again whenever anything has happened, it leads from whatever is there to what is wanted, and from the middle of
one change into another. What only waits gives no action. Asked for a world in which all of that ends well, it says all
of a change in advance (`diff`): for a look before anything is touched, and to refuse what would get stuck midway.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from deploy.change.limits import served, shortage
from deploy.change.types import (
    Action,
    Actual,
    Drain,
    Flip,
    Leave,
    Pause,
    Plan,
    Resume,
    Share,
    Shortage,
    Start,
    Stop,
    Wanted,
    carried_out,
    in_role,
)
from deploy.runtime.protocol import Observed, Phase, Spec
from epd_serve.roles import Role


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


_UNDER_WAY = (Phase.STARTING, Phase.DRAINING, Phase.STOPPING)


def wave(wanted: Wanted, actual: Actual, *, may_pause: bool = False) -> tuple[Action, ...] | Shortage:
    """What may begin now, in this order; () while something is under way, or when `reached`.

    Returns:
        A Shortage where nothing is under way and nothing may begin.
    """
    if reached(wanted, actual):
        return (Resume(),) if actual.paused else ()
    turn = _Turn(wanted, actual)
    if actions := tuple(turn.actions()):
        return actions
    if actual.paused and not turn.found.missing and turn.all_kept_up():
        return (Resume(),)
    if turn.under_way():
        return ()
    short = turn.short()
    return (Pause(),) if short.pause_helps and may_pause and not actual.paused else short


def reached(wanted: Wanted, actual: Actual) -> bool:
    """Every wanted instance is up in its part, on its cores, and no other is there. A pause may still have to end."""
    if len(actual.instances) != len(wanted.specs) or actual.leaving:
        return False
    found = match(wanted, actual.instances)
    return not found.missing and all(
        one.phase is Phase.UP and _is(one.order.spec, found.kept[one.order.id]) for one in actual.instances
    )


def _is(spec: Spec, wanted: Spec) -> bool:
    """Of one that stands for the other, whether it has to become it."""
    return spec.role is wanted.role and spec.cores == wanted.cores


class _Turn:
    """One look. What is decided counts as done for what is decided after it."""

    def __init__(self, wanted: Wanted, actual: Actual) -> None:
        self.actual = actual
        self.found = match(wanted, actual.instances)
        self.surplus = [one.order.id for one in self.found.surplus]

    def actions(self) -> Iterator[Action]:
        for some in (self._taken_back, self._flips, self._shares, self._starts, self._ends, self._drains):
            for action in some():
                yield action
                self.actual = carried_out(action, self.actual)

    @property
    def present(self) -> dict[str, Observed]:
        return {one.order.id: one for one in self.actual.instances}

    def _taken_back(self) -> Iterator[Action]:
        present = self.present
        for name, spec in self.found.kept.items():
            if present[name].phase is Phase.DRAINING:
                yield Start(name, replace(present[name].order.spec, role=spec.role))

    def _flips(self) -> Iterator[Action]:
        """To P at once; to D when no prefill is under way any more, so that no two wait for each other's blocks."""
        for name, spec in self.found.kept.items():
            one, leaves = self.present[name], name in self.actual.leaving
            stays = one.order.spec.role is spec.role
            if one.phase is not Phase.UP or (stays and not leaves):
                continue
            if spec.role is Role.P or (leaves and name in self.actual.quiet):
                if leaves or self._can_spare([name], flipped=in_role(one, spec.role)):
                    yield Flip(name, spec.role)
            elif not leaves and self._can_spare([name]):
                yield Leave(name)

    def _shares(self) -> Iterator[Action]:
        """Until all of a device have been told, two may compute on a core."""
        for name, spec in self.found.kept.items():
            one = self.present[name]
            if one.phase is Phase.UP and one.order.spec.cores != spec.cores:
                yield Share(name, spec)

    def _starts(self) -> Iterator[Action]:
        for spec in self.found.missing:
            if self._may_start(spec):
                present = self.present
                names = (f"{spec.role.value}{number}" for number in itertools.count())
                yield Start(next(name for name in names if name not in present), spec)

    def _ends(self) -> Iterator[Action]:
        for one in self.found.surplus:
            if one.over or one.phase is Phase.STARTING or one.order.id in self.actual.empty:
                yield Stop(one.order.id)

    def _drains(self) -> Iterator[Action]:
        """Surplus that goes now: all that can be spared once the wanted ones are up, or else as few as make room."""
        if self.found.missing:
            moving = any(one.phase in _UNDER_WAY for one in self.actual.instances)
            yield from map(Drain, () if moving else self._room_makers())
        elif self.all_kept_up() and not self.actual.paused:
            for name in self._stays_for_now():
                if self._can_spare([name]):
                    yield Drain(name)

    def _stays_for_now(self) -> list[str]:
        present = self.present
        return [name for name in self.surplus if present[name].phase not in (Phase.DRAINING, Phase.STOPPING)]

    def under_way(self) -> bool:
        return bool(self.actual.leaving) or any(
            one.phase in _UNDER_WAY or (one.phase is Phase.DOWN and not one.over) for one in self.actual.instances
        )

    def all_kept_up(self) -> bool:
        present = self.present
        return all(present[name].phase is Phase.UP for name in self.found.kept)

    def short(self) -> Shortage:
        """What the first missing instance lacks; or the path that nobody may take."""
        for spec in self.found.missing:
            why = shortage(spec, self.actual.instances, self.actual)
            if why is not None:
                helps = self._shortage_without(self.surplus, spec) is None and not self.actual.paused
                return replace(
                    why, blocks=tuple(name for name in why.blocks if name in self.surplus), pause_helps=helps
                )
        present = self.present
        flips = [name for name, spec in self.found.kept.items() if present[name].order.spec.role is not spec.role]
        going = sorted({*self.surplus, *flips})
        lost = self.actual.required - served(self._but(going), self.actual.leaving)
        return Shortage("last path", ", ".join(sorted(lost)), blocks=tuple(going), pause_helps=not self.actual.paused)

    def _may_start(self, spec: Spec) -> bool:
        """It fits; and where starts measure memory, nobody on its devices starts or stops."""
        kind = next((node.kind for node in self.actual.nodes if node.id == spec.node), "")
        on_node = (one for one in self.actual.instances if one.order.spec.node == spec.node)
        beside = (one for one in on_node if set(one.order.spec.devices) & set(spec.devices))
        restless = kind != "cpu" and any(one.phase in (Phase.STARTING, Phase.STOPPING) for one in beside)
        return not restless and shortage(spec, self.actual.instances, self.actual) is None

    def _room_makers(self) -> Collection[str]:
        """Few without whom something missing would fit, and that can be spared; () where there are none."""
        found = filter(None, map(self._room_makers_for, self.found.missing))
        return min(found, key=len, default=())

    def _room_makers_for(self, spec: Spec) -> list[str]:
        """Whoever takes most of what is short goes first, as long as it is, and then stays if it was not needed; where
        that leads nowhere, it is tried without the first one. Not always the fewest, but each try looks at nothing more
        often than there are instances, and there are no more tries than those.
        """
        candidates = self._stays_for_now()
        while candidates:
            gone = self._largest_first(spec, candidates)
            if self._shortage_without(gone, spec) is None:
                for name in tuple(gone):
                    others = [other for other in gone if other != name]
                    if self._shortage_without(others, spec) is None:
                        gone = others
                return gone
            if not gone:
                break
            candidates = [name for name in candidates if name != gone[0]]
        return []

    def _largest_first(self, spec: Spec, candidates: Collection[str]) -> list[str]:
        """Those that can be spared, until there is room, or nobody who could make some is left."""
        gone: list[str] = []
        present = self.present
        while (why := self._shortage_without(gone, spec)) is not None:
            blocking = [
                name
                for name in candidates
                if name in why.blocks and name not in gone and self._can_spare([*gone, name])
            ]
            if not blocking:
                break
            gone.append(max(blocking, key=lambda name: present[name].order.spec.needs.get(why.what, 0)))
        return gone

    def _shortage_without(self, gone: Iterable[str], spec: Spec) -> Shortage | None:
        return shortage(spec, self._but(gone), self.actual)

    def _can_spare(self, names: Iterable[str], *, flipped: Observed | None = None) -> bool:
        """Whether what is required is served without these, or with one of them in its other part. It is not while
        somebody it needs is between two lives: then nobody can be spared."""
        left = [*self._but(names), *([flipped] if flipped is not None else [])]
        return self.actual.paused or self.actual.required <= served(left, self.actual.leaving)

    def _but(self, names: Iterable[str]) -> list[Observed]:
        without = set(names)
        return [one for one in self.actual.instances if one.order.id not in without]


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
