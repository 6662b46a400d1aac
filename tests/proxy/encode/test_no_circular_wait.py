"""Places in the proxy never close a circle with encoders: a small model goes through all orders of events.

What is held at the stages is `tests/epd_serve/engine/ec/test_no_circular_wait.py`'s matter. Here requests take places
at the encoders and with the stages, follow each other's encodings, go ahead of them, and their clients leave. No
deadline helps.

A place with the stages stands for the credit of instances (`proxy/routing/credits.py`): what is before a request there
is work under way, which ends by itself or waits for its encoding alone. What a turn owes until it is counted there is
settled before anything is waited for (`tests/proxy/admission/test_gate.py`), so it is no place of its own here. Order
and shares say who is next, never that nobody is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True)
class Request:
    """One request for an item.

    Attributes:
        leads: it has the item encoded; else it follows one who does.
        place: it has a place at the encoders, until it is encoded and served. stage: with the stages, where it is then.
    """

    item: str
    leads: bool = True
    place: bool = False
    stage: bool = False
    done: bool = False


@dataclass(frozen=True)
class World:
    """`all_stand_back`: whoever went ahead of an encoding gives its place with the stages back when another one is to
    encode; `new_leader_stands_back`: only that one does."""

    requests: tuple[Request, ...]
    all_stand_back: bool = True
    new_leader_stands_back: bool = True
    encoded: frozenset[str] = frozenset()
    encodes: int = 1
    stages: int = 1

    def having(self, index: int, request: Request) -> World:
        return replace(self, requests=(*self.requests[:index], request, *self.requests[index + 1 :]))

    def taken(self, name: str) -> int:
        return sum(bool(getattr(request, name)) for request in self.requests)

    def at_work(self, item: str) -> bool:
        return any(one.place and one.item == item for one in self.requests)


def steps(world: World) -> Iterator[World]:
    """All worlds that may be next."""
    for index, request in enumerate(world.requests):
        if request.done:
            continue
        encoded = request.item in world.encoded
        if request.leads and not encoded and not request.place and world.taken("place") < world.encodes:
            yield world.having(index, replace(request, place=True))
        if request.place and not encoded:
            yield replace(world, encoded=world.encoded | {request.item})
        if encoded and request.place and request.stage:
            yield world.having(index, replace(request, place=False))
        if not request.stage and (encoded or world.at_work(request.item)) and world.taken("stage") < world.stages:
            yield world.having(index, replace(request, stage=True))
        if encoded and request.stage:
            yield world.having(index, replace(request, place=False, stage=False, done=True))
        if request.leads and request.place and not encoded:
            yield _left(world, index)


def _left(world: World, index: int) -> World:
    """The client of one who leads leaves: of those who follow the first leads then, and all stand back."""
    leader = world.requests[index]
    world = world.having(index, replace(leader, place=False, stage=False, done=True))
    handed_over = False
    for other, request in enumerate(world.requests):
        if request.item == leader.item and not (request.leads or request.done):
            stays = request.stage and not (world.all_stand_back or (world.new_leader_stands_back and not handed_over))
            world = world.having(other, replace(request, leads=not handed_over, stage=stays))
            handed_over = True
    return world


def circles(start: World) -> list[World]:
    """Reachable worlds in which somebody waits and nothing can happen any more."""
    seen, new, stuck = {start}, [start], []
    while new:
        world = new.pop()
        following = set(steps(world))
        if not following and not all(request.done for request in world.requests):
            stuck.append(world)
        new += following - seen
        seen |= following
    return stuck


FOLLOWED = (Request("a"), Request("a", leads=False), Request("a", leads=False), Request("b"), Request("c"))


@pytest.mark.parametrize(("encodes", "stages"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_no_order_of_events_leaves_anybody_waiting(encodes: int, stages: int) -> None:
    assert circles(World(FOLLOWED, encodes=encodes, stages=stages)) == []


@pytest.mark.parametrize("new_leader_stands_back", [True, False])
def test_it_would_if_somebody_kept_its_place_with_the_stages(new_leader_stands_back: bool) -> None:
    kept = World(FOLLOWED, all_stand_back=False, new_leader_stands_back=new_leader_stands_back)
    assert circles(kept) != []
