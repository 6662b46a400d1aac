"""Which kinds of requests a set of instances serves."""

from __future__ import annotations

from collections.abc import Iterable

from deploy.change.types import Actual, Kind, Wanted
from deploy.runtime.protocol import Observed, Phase
from epd_serve.roles import Role
from proxy.routing.paths import paths

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
