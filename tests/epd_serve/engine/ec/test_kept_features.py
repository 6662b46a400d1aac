"""What D holds on to for requests that may be preempted: in memory, and on a real arena with a real listener."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epd_serve import wire
from epd_serve.engine.ec.kept_features import KeptFeatures
from epd_serve.roles import Role
from store.arena import Arena
from store.errors import StoreError
from tests.epd_serve.engine.ec.stages import CAPACITY, Mouth, Stages, settled
from tests.waiting import wait_for


@dataclass(frozen=True, eq=False)
class Pinned:
    key: str
    nbytes: int
    out: list[str]

    def release(self) -> None:
        self.out.remove(self.key)


@dataclass
class Shelf:
    """Features that are at hand, and the pins that are out."""

    sizes: dict[str, int]
    out: list[str] = field(default_factory=list)

    def lease(self, key: str) -> Any:
        if key == "broken":
            raise StoreError("the arena does not answer")
        if key not in self.sizes:
            return None
        self.out.append(key)
        return Pinned(key, self.sizes[key], self.out)


def keeping(max_bytes: int = 100, **sizes: int) -> tuple[KeptFeatures, Shelf]:
    shelf = Shelf(sizes)
    return KeptFeatures(shelf.lease, max_bytes=max_bytes), shelf


def test_features_are_kept_while_one_request_that_needs_them_runs() -> None:
    kept, shelf = keeping(a=10, b=10)
    assert kept.keep("r", ["a", "b", "a"])
    kept.fill()
    assert sorted(shelf.out) == ["a", "b"]
    assert not kept.keep("s", ["a"])  # held already
    kept.release(["r", "unknown"])
    assert shelf.out == ["a"]
    kept.release(["s"])
    assert shelf.out == []


def test_a_request_asks_at_every_step_and_is_kept_once() -> None:
    kept, shelf = keeping(a=10)
    assert kept.keep("r", ["a"])
    assert not kept.keep("r", ["a"])
    kept.fill()
    assert not kept.keep("r", ["a"])
    kept.fill()
    assert shelf.out == ["a"]


def test_what_two_requests_ask_for_at_once_is_pinned_once() -> None:
    kept, shelf = keeping(a=10)
    kept.keep("r", ["a"])
    kept.keep("s", ["a"])
    kept.fill()
    assert shelf.out == ["a"]


def test_what_is_beyond_the_bound_is_left_to_eviction() -> None:
    kept, shelf = keeping(25, a=10, b=10, c=10)
    kept.keep("r", ["a", "b", "c"])
    kept.fill()
    assert len(shelf.out) == 2
    assert kept.counters() == {"kept": 2, "not_kept": 1}
    kept.release(["r"])
    kept.keep("s", ["c"])
    kept.fill()
    assert shelf.out == ["c"]


def test_a_request_that_ends_before_its_features_were_leased_leaves_no_pin() -> None:
    kept, shelf = keeping(a=10)
    kept.keep("r", ["a"])
    kept.release(["r"])
    kept.fill()
    assert shelf.out == []


def test_an_absent_feature_and_a_store_that_does_not_answer_harm_nobody() -> None:
    kept, shelf = keeping(a=10)
    kept.keep("r", ["absent", "broken", "a"])
    kept.fill()
    assert shelf.out == ["a"]


def test_whoever_waits_for_room_gets_it() -> None:
    kept, shelf = keeping(a=10)
    kept.keep("r", ["a"])
    kept.fill()
    kept.make_room()
    assert shelf.out == []
    kept.release(["r"])
    kept.keep("s", ["a"])  # a later request finds what is still there
    kept.fill()
    assert shelf.out == ["a"]


def put(arena: Arena, key: str, nbytes: int = 64) -> None:
    arena.put(key, np.zeros(nbytes, np.uint8), shape=(nbytes,), dtype="uint8")


def test_a_preempted_request_finds_its_feature_after_all_others_were_evicted(stages: Stages, arena: Arena) -> None:
    put(arena, "mine")
    put(arena, "other")
    d = stages.consumer(hears=False, role=Role.D)
    d.keep("r", ["mine"])
    wait_for(lambda: arena.stats().leased == 1)
    while arena.contains("other"):
        put(arena, f"filler {arena.stats().puts}", CAPACITY // 8)
    settled(d, "mine", request="r")  # preempted: it computes its prompt here
    assert d.pinned("mine") is not None
    d.release(["r"])
    wait_for(lambda: arena.stats().leased == 0)


def test_an_encoder_without_room_gets_what_was_kept(stages: Stages, arena: Arena) -> None:
    put(arena, "mine")
    d = stages.consumer(role=Role.D)
    d.keep("r", ["mine"])
    wait_for(lambda: arena.stats().leased == 1)
    e = Mouth(stages.events("E0"))
    try:
        report = wire.StoreReport("E0", "i", CAPACITY, CAPACITY, 1, waiting_puts=1)
        e.say_until(lambda: arena.stats().leased == 0, report)
    finally:
        e.close()
    d.release(["r"])
