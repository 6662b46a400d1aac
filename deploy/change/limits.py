"""What must hold at every step of a change: which kinds of requests are served, and that instances fit in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from deploy.change.types import Actual, Kind, Shortage, Wanted
from deploy.memory.shared_memory import kv_links
from deploy.runtime.protocol import SHARED_MEMORY, Node, Observed, Phase, Spec
from epd_serve.roles import Role
from proxy.routing.plan import paths

KINDS: dict[Kind, tuple[bool, bool]] = {"text": (False, False), "media": (True, False), "fused": (False, True)}
"""Kind -> (has media, needs one instance that prefills and decodes)."""


def kinds(roles: Iterable[Role]) -> frozenset[Kind]:
    """Those that have a path through these roles. Encoders are on none: whoever prefills has the tower, too. A prefill
    without any decode serves nothing that anybody waits for, although it could answer alone."""
    there = frozenset(roles)
    if not paths(there, multimodal=False):
        return frozenset()
    return frozenset(kind for kind, (media, fused) in KINDS.items() if paths(there, multimodal=media, fused=fused))


def served(instances: Iterable[Observed], leaving: frozenset[str] = frozenset()) -> frozenset[Kind]:
    """By the instances that are up and are given requests."""
    return kinds(one.order.spec.role for one in instances if one.phase is Phase.UP and one.order.id not in leaving)


def required(wanted: Wanted, actual: Actual) -> frozenset[Kind]:
    """What no action may take the last path of: all that is served now, and by the wanted layout, too.

    Whoever has been up counts: one that is between two lives is coming back, and its path is not lost by that. What
    went with a node is lost, and binds nobody.
    """
    return kinds(one.order.spec.role for one in actual.instances if _serves(one)) & kinds(wanted.roles)


def _serves(one: Observed) -> bool:
    """Now, or again when its next life answers."""
    between_lives = (one.phase is Phase.DOWN and not one.over) or (one.phase is Phase.STARTING and one.ever_up)
    return one.phase is Phase.UP or between_lives


def shortage(spec: Spec, beside: Sequence[Observed], actual: Actual) -> Shortage | None:
    """Why an instance of this spec does not fit beside the others; None where it does. The worst resource is named."""
    node = next((one for one in actual.nodes if one.id == spec.node), None)
    if node is None:
        return Shortage("node", spec.node)
    there = [one for one in beside if one.order.spec.node == spec.node and not one.over]
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
    senders, takers, both = Counter[int](), Counter[int](), 0
    for spec in specs:
        width, sends, takes = len(spec.devices), spec.role.sends_kv or spec.both, spec.role.takes_kv or spec.both
        senders[width] += sends
        takers[width] += takes
        both += kv_links(width, width) * (sends and takes)  # nobody has a link to itself
    return sum(kv_links(a, b) * count * takers[b] for a, count in senders.items() for b in takers) - both
