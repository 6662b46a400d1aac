"""The plan of an attempt: which way through the layout, on which instances, and what it went by. Pure.

Every instance that takes prompts (a head: P, EP, PD, EPD) competes with every other one, whatever its kind: loads of
heads are all prompt tokens. Whether a request's items are encoded apart follows from the head, not from the layout.
Heads are preferred for which the items are ready. What asks for plans, and counts their instances as busy, is
`proxy/generate/router.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from epd_serve.instances import IncarnationId
from epd_serve.roles import Role
from proxy.routing.paths import Path, paths
from proxy.routing.policy import (
    POLICIES,
    Candidate,
    Placement,
    burden,
    first_token,
    least_loaded,
    left_of,
    most_cached,
    preferred,
    with_neighbours,
)

Flags = tuple[str, ...] | None
"""`Instance.answer_flags`, or None for any."""


class Question(Struct, frozen=True):
    """What is known of a request when it is to be planned.

    Attributes:
        placement: its prompt, in tokens.
        items: tokens of each of its media items. encoded: they are encoded, or were given up.
        fused: it needs one instance that prefills and decodes.
        avoid: incarnations at which it has failed.
        flags: of who decodes, where an answer goes on. ahead: its items are being encoded.
    """

    placement: Placement
    items: tuple[float, ...] = ()
    encoded: bool = False
    fused: bool = False
    avoid: Collection[IncarnationId] = ()
    flags: Flags = None
    ahead: bool = False

    @property
    def undecided(self) -> bool:
        """Who encodes its items follows from where it goes."""
        return bool(self.items) and not self.encoded


class View(Struct, frozen=True):
    """The instances as they are now.

    Attributes:
        live: those that get requests, by role.
        wanted: roles that the deployment is to have.
        cached: tokens of the request's prompt that each has in its prefix cache.
        flags: answer flags by id, where the question has some.
        tower_shares_cores: encoders compute on cores on which others would prepare the request.
    """

    live: Mapping[Role, Sequence[Candidate]]
    wanted: frozenset[Role]
    cached: Mapping[IncarnationId, float] = {}
    flags: Mapping[str, Flags] = {}
    tower_shares_cores: bool = False

    def of(self, role: Role, flags: Flags = None) -> Sequence[Candidate]:
        """Those of a role, with what each has cached; of these flags where they matter."""
        live = self.live.get(role, ())
        if flags is not None:
            live = [one for one in live if self.flags.get(one.id) == flags]
        if not self.cached:
            return live
        return [replace(one, cached=tokens) if (tokens := self.cached.get(one.incarnation_id)) else one for one in live]


class Pick(Struct, frozen=True):
    """One instance, and what it was chosen by.

    Attributes:
        chosen: as the policy saw it: encoding that the request has to wait for first counts as load of its own.
        policy: which chose. cost: what the work adds, in the candidates' unit.
        seen: who was there. paths: for each the way that the request would take, of a head.
        ranks: for each what spoke against it before any load, of a head; only those with the lowest were compared.
    """

    chosen: Candidate
    policy: str
    cost: float
    seen: Sequence[Candidate]
    paths: Sequence[str] = ()
    ranks: Sequence[tuple[int, ...]] = ()


class Plan(Struct, frozen=True):
    """What an attempt does.

    Attributes:
        path: through the layout. head: takes the prompt. tail: decodes, where the head does not.
        left: tokens of the prompt that the head has to compute.
        clear: it touches no instance at which the request has failed.
        decode_waits: D is to prepare the request when the first item is encoded: P needs it no sooner, and all wait for
            the tower, which needs the cores.
    """

    path: Path
    head: Pick
    tail: Pick | None
    left: float
    clear: bool
    decode_waits: bool = False


def make_plan(question: Question, view: View, policy: str = "first-token") -> Plan | None:
    """The plan for one attempt, by the policy of this name, preferring instances at which the request has not failed;
    None where there is no way through what is live.

    Its path may encode apart although the items are not encoded (the heads that would do it themselves are gone): then
    they have to be first.
    """
    choices = _choices(question, view, policy)
    if not choices:
        return None
    chosen = choices[0]
    if len(choices) > 1:
        fittest = min(choice.rank for choice in choices)
        compared = [choice for choice in choices if choice.rank == fittest]
        best = POLICIES[policy]([choice.head for choice in compared], question.placement)
        chosen = next(choice for choice in compared if choice.head is best)
    cost = question.placement.cost
    head = Pick(
        chosen.head,
        policy,
        cost,
        [choice.head for choice in choices],
        [choice.path.name for choice in choices],
        [choice.rank for choice in choices],
    )
    parts = [chosen.head] if chosen.tail is None else [chosen.head, chosen.tail.chosen]
    clear = not any(part.incarnation_id in question.avoid for part in parts)
    return Plan(
        chosen.path, head, chosen.tail, left_of(cost, chosen.head), clear, question.ahead and view.tower_shares_cores
    )


def ways(question: Question, view: View) -> frozenset[bool]:
    """Whether items may be encoded apart on the way of a request with some, and whether they may not. Where nobody is
    up, by the roles that are wanted."""
    live = _paths(question, view)
    possible = live or paths(view.wanted, multimodal=True, fused=question.fused)
    return frozenset(path.encode for path in possible)


class _Choice(Struct, frozen=True):
    """One head that a request can go to, who decodes then, and what speaks against it before any load."""

    path: Path
    head: Candidate
    tail: Pick | None
    rank: tuple[int, ...]


def _choices(question: Question, view: View, policy: str) -> list[_Choice]:
    """Every live head that the request can go to, and of each kind with which tail."""
    encoders = view.of(Role.E) if question.undecided else ()
    choices = []
    for path in _paths(question, view):
        tail = None
        if path.tail is not None:
            tails = preferred(view.of(path.tail, question.flags), question.avoid)
            if not tails:
                continue
            tail = _tail(tails, question.placement, policy)
        for head in view.of(path.head, question.flags if path.tail is None else None):
            rank = (
                burden(head, question.avoid) + (burden(tail.chosen, question.avoid) if tail is not None else 0),
                int(question.encoded and bool(question.items) and not path.encode),
                int(path.encode and question.undecided and not encoders),
            )
            if question.undecided:
                head = _with_encoding(head, question.items, encoders if path.encode else ())
            choices.append(_Choice(path, head, tail, rank))
    return choices


def _paths(question: Question, view: View) -> Sequence[Path]:
    """Through live roles. E counts as live while one is wanted: the encode step itself copes with none being up."""
    roles = frozenset(view.live)
    if question.items:
        roles |= view.wanted & {Role.E}
    return paths(roles, multimodal=bool(question.items), fused=question.fused)


def _tail(tails: Sequence[Candidate], placement: Placement, policy: str) -> Pick:
    """Who decodes. There is no first token to predict where another one has prefilled: what is cached counts."""
    placement = replace(placement, cost=1.0)
    if POLICIES[policy] is not first_token:
        return Pick(POLICIES[policy](tails, placement), policy, 1.0, tails)
    name = "most-cached" if any(one.cached for one in tails) else "least-loaded"
    return Pick(most_cached(tails, placement), name, 1.0, tails)


def _with_encoding(head: Candidate, items: Sequence[float], encoders: Sequence[Candidate]) -> Candidate:
    """`head` with the encoding that the request has to wait for first as load of its own: at the head itself, or shared
    by `encoders` and behind what the first of them to be done has to do, in the head's time where both speeds are
    known."""
    tokens = sum(items)
    if encoders:
        share = tokens / min(len(items), len(encoders))
        encoder = least_loaded(with_neighbours(encoders, share))
        tokens = encoder.load + share
        if head.rate > 0 and encoder.rate > 0:
            tokens *= head.rate / encoder.rate
    return replace(head, load=head.load + tokens)
