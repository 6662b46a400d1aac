"""The next actions of a change: all that may begin now, and never one that takes a last path or more than there is.

Asked again whenever anything has happened, it leads from whatever is there to what is wanted, and from the middle of
one change into another. What only waits gives no action.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from deploy.change.match import Match, given_up, match
from deploy.change.serving import served
from deploy.change.types import Action, Actual, Drain, Flip, Leave, Pause, Resume, Shortage, Start, Stop, Wanted
from deploy.memory.shared_memory import kv_links
from deploy.runtime.protocol import SHARED_MEMORY, Node, Observed, Order, Phase, Spec
from epd_serve.roles import Role

MOST_CHOICES = 4096
"""So many sets of instances are looked at for one whose room would do."""

_UNDER_WAY = (Phase.STARTING, Phase.DRAINING, Phase.STOPPING)


def wave(wanted: Wanted, actual: Actual, *, may_pause: bool = False) -> tuple[Action, ...] | Shortage:
    """What may begin now, in this order; () while something is under way, or when `reached`.

    Returns:
        A Shortage where nothing is under way and nothing may begin.
    """
    if reached(wanted, actual):
        return (Resume(),) if actual.paused else ()
    turn = _Turn(wanted, actual)
    actions = [*turn.taken_back(), *turn.flips(), *turn.starts(), *turn.ends()]
    if actions:
        return tuple(actions)
    if actual.paused and not turn.found.missing and turn.all_kept_up():
        return (Resume(),)
    if turn.under_way():
        return ()
    short = turn.short()
    return (Pause(),) if short.pause_helps and may_pause and not actual.paused else short


def reached(wanted: Wanted, actual: Actual) -> bool:
    """Every wanted instance is up in its part, and no other is there. A pause may still have to end."""
    if len(actual.instances) != len(wanted.specs) or actual.leaving:
        return False
    found = match(wanted, actual.instances)
    return not found.missing and all(
        one.phase is Phase.UP and one.order.spec.role is found.kept[one.order.id].role for one in actual.instances
    )


class _Turn:
    """One look. What is decided counts as done for what is decided after it."""

    def __init__(self, wanted: Wanted, actual: Actual) -> None:
        self.actual = actual
        self.found: Match = match(wanted, actual.instances)
        self.present = {one.order.id: one for one in actual.instances}
        self.leaving = set(actual.leaving)

    def taken_back(self) -> Iterator[Action]:
        for name, spec in self.found.kept.items():
            one = self.present[name]
            if one.phase is Phase.DRAINING:
                yield Start(name, replace(one.order.spec, role=spec.role))
                self._now(one, Phase.UP, spec.role)

    def flips(self) -> Iterator[Action]:
        """To P at once; to D when no prefill is under way any more, so that no two wait for each other's blocks."""
        for name, spec in self.found.kept.items():
            one = self.present[name]
            stays = one.order.spec.role is spec.role
            if one.phase is not Phase.UP or (stays and name not in self.leaving):
                continue
            if spec.role is Role.P or name in self.actual.quiet & self.leaving:
                if stays or name in self.leaving or self._can_spare(name, flipped_to=spec.role):
                    yield Flip(name, spec.role)
                    self.leaving.discard(name)
                    self._now(one, Phase.UP, spec.role)
            elif name not in self.leaving and self._can_spare(name):
                yield Leave(name)
                self.leaving.add(name)

    def starts(self) -> Iterator[Action]:
        for spec in self.found.missing:
            if self._may_start(spec):
                order = Order(self._free_id(spec.role), spec)
                yield Start(order.id, spec)
                self.present[order.id] = Observed(order, Phase.STARTING)

    def ends(self) -> Iterator[Action]:
        for one in self.found.surplus:
            name = one.order.id
            if given_up(one) or one.phase is Phase.STARTING or name in self.actual.empty:
                yield Stop(name)
                self._now(one, Phase.STOPPING)
        for name in self._to_drain():
            yield Drain(name)
            self._now(self.present[name], Phase.DRAINING)

    def under_way(self) -> bool:
        return bool(self.leaving) or any(
            one.phase in _UNDER_WAY or (one.phase is Phase.DOWN and not one.over) for one in self.present.values()
        )

    def all_kept_up(self) -> bool:
        return all(self.present[name].phase is Phase.UP for name in self.found.kept)

    def short(self) -> Shortage:
        """What the first missing instance lacks; or the path that nobody may take."""
        surplus = {one.order.id for one in self.found.surplus}
        others = [one for one in self.present.values() if one.order.id not in surplus]
        for spec in self.found.missing:
            why = shortage(spec, [*self.present.values()], self.actual)
            if why is not None:
                helps = shortage(spec, others, self.actual) is None and not self.actual.paused
                return replace(why, blocks=tuple(name for name in why.blocks if name in surplus), pause_helps=helps)
        going = sorted(surplus | {name for name, spec in self.found.kept.items() if self._role(name) is not spec.role})
        lost = self.actual.required - served(self._those_up(going), frozenset(self.leaving))
        return Shortage("last path", ", ".join(sorted(lost)), blocks=tuple(going), pause_helps=not self.actual.paused)

    def _role(self, name: str) -> Role:
        return self.present[name].order.spec.role

    def _now(self, one: Observed, phase: Phase, role: Role | None = None) -> None:
        spec = one.order.spec if role is None else replace(one.order.spec, role=role)
        self.present[one.order.id] = replace(one, order=Order(one.order.id, spec), phase=phase)

    def _free_id(self, role: Role) -> str:
        names = (f"{role.value}{number}" for number in itertools.count())
        return next(name for name in names if name not in self.present)

    def _may_start(self, spec: Spec) -> bool:
        """It fits; and where starts measure memory, nobody on its devices starts or stops."""
        kind = next((node.kind for node in self.actual.nodes if node.id == spec.node), "")
        on_node = (one for one in self.present.values() if one.order.spec.node == spec.node)
        beside = (one for one in on_node if set(one.order.spec.devices) & set(spec.devices))
        restless = kind != "cpu" and any(one.phase in (Phase.STARTING, Phase.STOPPING) for one in beside)
        return not restless and shortage(spec, [*self.present.values()], self.actual) is None

    def _to_drain(self) -> Collection[str]:
        """Surplus that goes now: all that can be spared once the wanted ones are up, or else as few as make room."""
        surplus = [one.order.id for one in self.found.surplus if self.present[one.order.id].phase is not Phase.STOPPING]
        surplus = [name for name in surplus if self.present[name].phase is not Phase.DRAINING]
        if not self.found.missing:
            return self._spared(surplus) if self.all_kept_up() and not self.actual.paused else ()
        moving = any(one.phase in _UNDER_WAY for one in self.present.values())
        return () if moving else self._room_makers(surplus)

    def _spared(self, names: Sequence[str]) -> list[str]:
        gone: list[str] = []
        for name in names:
            if self._can_spare(name, *gone):
                gone.append(name)
        return gone

    def _room_makers(self, surplus: Sequence[str]) -> Sequence[str]:
        """The smallest set without which something missing would fit, and that can be spared."""
        lacking = [shortage(spec, [*self.present.values()], self.actual) for spec in self.found.missing]
        blocking = {name for why in lacking if why is not None for name in why.blocks}
        candidates = sorted(surplus, key=lambda name: name not in blocking)
        sets = (some for size in range(1, len(candidates) + 1) for some in itertools.combinations(candidates, size))
        for some in itertools.islice(sets, MOST_CHOICES):
            others = [one for name, one in self.present.items() if name not in some]
            makes_room = any(shortage(spec, others, self.actual) is None for spec in self.found.missing)
            if makes_room and (self.actual.paused or self._can_spare(*some)):
                return some
        return ()

    def _can_spare(self, *names: str, flipped_to: Role | None = None) -> bool:
        """Whether what is required is served without these, or with the first of them in its other part. It is not
        while somebody it needs is between two lives: then nobody can be spared."""
        if self.actual.paused:
            return True
        left = self._those_up(names)
        if flipped_to is not None:
            one = self.present[names[0]]
            left.append(replace(one, order=Order(one.order.id, replace(one.order.spec, role=flipped_to))))
        return self.actual.required <= served(left, frozenset(self.leaving))

    def _those_up(self, but: Collection[str] = ()) -> list[Observed]:
        return [one for name, one in self.present.items() if name not in but and one.phase is Phase.UP]


def shortage(spec: Spec, beside: Sequence[Observed], actual: Actual) -> Shortage | None:
    """Why an instance of this spec does not fit beside the others; None where it does. The worst resource is named."""
    node = next((one for one in actual.nodes if one.id == spec.node), None)
    if node is None:
        return Shortage("node", spec.node)
    there = [one for one in beside if one.order.spec.node == spec.node and not given_up(one)]
    taken = _taken([spec, *(one.order.spec for one in there)], node)
    lacking = [(amount - node.room[what], what) for what, amount in taken.items() if amount > _room(node, what)]
    if not lacking:
        return None
    over, what = max(lacking)
    free = max(0, node.room[what] - _taken([one.order.spec for one in there], node)[what])
    blocks = tuple(one.order.id for one in there if what == SHARED_MEMORY or one.order.spec.needs.get(what))
    return Shortage(what, spec.node, needed=free + over, free=free, blocks=blocks)


def _room(node: Node, what: str) -> float:
    return node.room.get(what, float("inf"))


def _taken(specs: Sequence[Spec], node: Node) -> Counter[str]:
    """Bytes by resource: what each takes, the arena where features travel, and a staging area per KV link."""
    taken: Counter[str] = Counter()
    for spec in specs:
        taken.update(spec.needs)
    shared = _links(specs) * node.staging_bytes + any(spec.featured for spec in specs) * node.arena_bytes
    if shared:
        taken[SHARED_MEMORY] += shared
    return taken


def _links(specs: Iterable[Spec]) -> int:
    """KV links between all that may send and all that may take; those that a flip has left idle are kept."""
    pairs = itertools.permutations(specs, 2)
    return sum(kv_links(len(one.devices), len(other.devices)) for one, other in pairs if _sends(one) and _takes(other))


def _sends(spec: Spec) -> bool:
    return spec.role.sends_kv or spec.both


def _takes(spec: Spec) -> bool:
    return spec.role.takes_kv or spec.both
