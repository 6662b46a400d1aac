"""The plan of an attempt: which way through the layout, on which instances, and what it went by. Pure.

Paths by roles: multimodal: EPD | E->PD | EP->D | E->P->D; text: EPD | PD | EP->D | P->D; fused, without EPD and PD:
EP | E->P. Several kinds may stand side by side (`E-P-D` beside `EPD`). Every instance that takes prompts (a head: P,
EP, PD, EPD) competes with every other one, whatever its kind: loads of heads are all prompt tokens. Whether a request's
items are encoded apart follows from the head, not from the layout; heads are preferred for which the items are ready.
An instance that prefills holds the vision tower too, so the encode step may be skipped when every E is down. It can
decode as well: what needs one instance for both, and has none that is there for both, it answers alone.

What asks for plans, and counts their instances as busy, is `proxy/generate/router.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from epd_serve.instances import IncarnationId
from epd_serve.roles import Role
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


@dataclass(frozen=True)
class Path:
    """One way through the layout.

    Attributes:
        encode: an E instance encodes the items first.
        prefill: role that prefills for another instance, or None where the decoder prefills itself.
        decode: role that answers the client.
    """

    encode: bool
    prefill: Role | None
    decode: Role

    @functools.cached_property
    def name(self) -> str:
        stages = ("E" if self.encode else None, self.prefill, self.decode)
        return "-".join(stage for stage in stages if stage)

    @property
    def head(self) -> Role:
        """Role of the instance that takes the prompt first."""
        return self.prefill or self.decode

    @property
    def tail(self) -> Role | None:
        """Role of the instance that decodes what the head has prefilled, or None where the head does."""
        return self.decode if self.prefill is not None else None

    @property
    def required(self) -> tuple[Role, ...]:
        """Roles without which the path cannot be taken (E is not among them)."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


def paths(roles: Collection[Role], *, multimodal: bool, fused: bool = False) -> tuple[Path, ...]:
    """All paths that `roles` allow, one per kind of head.

    Args:
        roles: roles to build from (of the layout, or of its live instances).
        multimodal: the request has media items.
        fused: it needs one instance that prefills and decodes (`echo`, `prompt_logprobs`, beam search).
    """
    return _through(frozenset(roles), multimodal, fused)


@functools.lru_cache(maxsize=256)
def _through(roles: frozenset[Role], multimodal: bool, fused: bool) -> tuple[Path, ...]:
    encode = multimodal and Role.E in roles
    whole = [Path(False, None, Role.EPD), Path(encode, None, Role.PD)]
    apart = [Path(False, Role.EP, Role.D), Path(encode, Role.P, Role.D)]
    alone = [Path(False, None, Role.EP), Path(encode, None, Role.P)]

    def there(among: list[Path]) -> tuple[Path, ...]:
        return tuple(path for path in among if all(role in roles for role in path.required))

    return there(whole) or there(alone) if fused else there(whole + apart)


Flags = tuple[str, ...] | None
"""`Instance.answer_flags`, or None for any."""


class Question(Struct, frozen=True):
    """What is known of a request when it is to be planned. A plan that was made for another question is out of date.

    Attributes:
        tokens: of its prompt. items: of each of its media items. encoded: they are encoded, or were given up.
        fused: it needs one instance that prefills and decodes.
        avoid: incarnations at which it has failed.
        flags: of who decodes, where an answer goes on. ahead: its items are being encoded.
    """

    tokens: float
    items: tuple[float, ...] = ()
    encoded: bool = False
    fused: bool = False
    avoid: frozenset[IncarnationId] = frozenset()
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
        known: tokens of the prompt's beginning that some instance is known to have had.
        cached: tokens of the request's prompt that each has in its prefix cache.
        flags: answer flags by id, where the question has some.
        tower_shares_cores: encoders compute on cores on which others would prepare the request.
        draw: a random number, as in `Placement`. at: `time.monotonic` of the look.
    """

    live: Mapping[Role, Sequence[Candidate]]
    wanted: frozenset[Role]
    known: int = 0
    cached: Mapping[IncarnationId, float] = {}
    flags: Mapping[str, Flags] = {}
    tower_shares_cores: bool = False
    draw: int = 0
    at: float = 0.0

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
        chosen: with the encoding that it has to wait for, or would do, as load of its own.
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
    """What an attempt does, and what was known when that was decided.

    Attributes:
        path: through the layout. head: takes the prompt. tail: decodes, where the head does not.
        left: tokens of the prompt that the head has to compute.
        clear: it touches no instance at which the request has failed.
        decode_waits: D is to prepare the request when the first item is encoded: P needs it no sooner, and all wait for
            the tower, which needs the cores.
        encoders: ids of those that may be asked for the items now. skipped: why none is.
        question: that it answers. known: tokens of the prompt's beginning that were known.
        made_at: `time.monotonic`. because: why it was made.
    """

    path: Path
    head: Pick
    tail: Pick | None
    left: float
    clear: bool
    decode_waits: bool
    encoders: Sequence[str]
    skipped: str
    question: Question
    known: int
    made_at: float
    because: str

    @property
    def picks(self) -> Sequence[Pick]:
        return (self.head,) if self.tail is None else (self.head, self.tail)


def make_plan(question: Question, view: View, policy: str = "first-token", because: str = "it arrived") -> Plan | None:
    """The plan for one attempt, by the policy of this name, preferring instances at which the request has not failed;
    None where there is no way through what is live.

    Its path may encode apart although the items are not encoded (the heads that would do it themselves are gone): then
    they have to be first.
    """
    choices = _choices(question, view, policy)
    if not choices:
        return None
    fittest = min(choice.rank for choice in choices)
    compared = [choice for choice in choices if choice.rank == fittest]
    chosen = compared[0]
    if len(compared) > 1:
        best = POLICIES[policy]([choice.head for choice in compared], Placement(question.tokens, view.draw))
        chosen = next(choice for choice in compared if choice.head is best)
    head = Pick(
        chosen.head,
        policy,
        question.tokens,
        [choice.head for choice in choices],
        [choice.path.name for choice in choices],
        [choice.rank for choice in choices],
    )
    apart = question.undecided and chosen.path.encode
    encoders = [one.id for one in view.of(Role.E)] if apart else ()
    return Plan(
        chosen.path,
        head,
        chosen.tail,
        left=left_of(question.tokens, chosen.head),
        clear=not any(pick.chosen.incarnation_id in question.avoid for pick in (head, chosen.tail) if pick is not None),
        decode_waits=question.ahead and view.tower_shares_cores,
        encoders=encoders,
        skipped="" if encoders else _why_nobody_encodes(question, apart=apart),
        question=question,
        known=view.known,
        made_at=view.at,
        because=because,
    )


def _why_nobody_encodes(question: Question, *, apart: bool) -> str:
    if not question.items:
        return "no items"
    if question.encoded:
        return "its items are being encoded" if question.ahead else "its items are encoded"
    return "no encoder is up" if apart else "who takes the prompt encodes"


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
    undecided = question.undecided
    encoders = view.of(Role.E) if undecided else ()
    choices = []
    for path in _paths(question, view):
        tail = None
        if path.tail is not None:
            tails = preferred(view.of(path.tail, question.flags), question.avoid)
            if not tails:
                continue
            tail = _tail(tails, view.draw, policy)
        for head in view.of(path.head, question.flags if path.tail is None else None):
            rank = (
                burden(head, question.avoid) + (burden(tail.chosen, question.avoid) if tail is not None else 0),
                int(question.encoded and bool(question.items) and not path.encode),
                int(path.encode and undecided and not encoders),
            )
            if undecided:
                head = _with_encoding(head, question.items, encoders if path.encode else ())
            choices.append(_Choice(path, head, tail, rank))
    return choices


def _paths(question: Question, view: View) -> Sequence[Path]:
    """Through live roles. E counts as live while one is wanted: the encode step itself copes with none being up."""
    roles = frozenset(view.live)
    if question.items:
        roles |= view.wanted & {Role.E}
    return paths(roles, multimodal=bool(question.items), fused=question.fused)


def _tail(tails: Sequence[Candidate], draw: int, policy: str) -> Pick:
    """Who decodes. There is no first token to predict where another one has prefilled: what is cached counts."""
    placement = Placement(1.0, draw)
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
