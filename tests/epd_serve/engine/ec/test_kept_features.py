"""What consumers use, so that it is not evicted, and what they do not: on a real arena with a real listener."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from epd_serve import wire
from epd_serve.engine.ec.store_access import SPARE_S
from epd_serve.roles import Role
from store.arena import Arena
from store.errors import StoreFullError
from tests.epd_serve.engine.ec.stages import CAPACITY, Mouth, Stages, is_ready, settled
from tests.waiting import PATIENCE_S, wait_for


def put(arena: Arena, key: str, nbytes: int = 64) -> None:
    arena.put(key, np.zeros(nbytes, np.uint8), shape=(nbytes,), dtype="uint8")


@pytest.fixture
def encoder(arena: Arena) -> Iterator[Arena]:
    """The arena as an encoder has it, which spares what was just used."""
    opened = Arena.attach(arena.path, spare_s=SPARE_S)
    yield opened
    opened.close()


def fill(encoder: Arena, until: Callable[[], bool]) -> None:
    """Put one feature after another, as long as it takes."""
    end, number = time.monotonic() + PATIENCE_S, 0
    while not until():
        assert time.monotonic() < end, "nothing is evicted"
        try:
            put(encoder, f"filler {number}", CAPACITY // 8)
            number += 1
        except StoreFullError:
            time.sleep(0.02)  # as an encoder does


def test_a_preempted_request_finds_its_feature_after_all_others_were_evicted(
    stages: Stages, arena: Arena, encoder: Arena
) -> None:
    put(arena, "mine")
    put(arena, "other")
    d = stages.consumer(hears=False, role=Role.D)
    d.keep("r", ["mine"])
    fill(encoder, lambda: not arena.contains("other"))
    begun = arena.stats().evictions
    fill(encoder, lambda: arena.stats().evictions > begun + 16)
    assert arena.stats().leased == 0, "used, not held"
    settled(d, "mine", request="r")  # preempted: it computes its prompt here
    assert d.pinned("mine") is not None
    d.release(["r"])
    wait_for(lambda: arena.stats().leased == 0)
    fill(encoder, lambda: not arena.contains("mine"))


def test_an_encoder_without_room_gets_what_was_kept(stages: Stages, arena: Arena, encoder: Arena) -> None:
    put(arena, "mine")
    d = stages.consumer(role=Role.D)
    d.keep("r", ["mine"])
    e = Mouth(stages.events("E0"))
    try:
        report = wire.StoreReport("E0", "i", CAPACITY, CAPACITY, 1, waiting_puts=1)
        e.say_until(lambda: d._listener._short, report)
        fill(encoder, lambda: not arena.contains("mine"))
    finally:
        e.close()


def test_who_waits_for_more_holds_nothing_but_the_first_keeps_what_it_has(
    stages: Stages, arena: Arena, encoder: Arena
) -> None:
    p = stages.consumer(hears=False)
    for request, keys in (("a", ("a1", "a2")), ("b", ("b1", "b2"))):
        put(arena, keys[0])
        assert not p.settled(request, keys)
        wait_for(lambda keys=keys: is_ready(p, keys[0]))
    fill(encoder, lambda: not arena.contains("b1"))
    begun = arena.stats().evictions
    fill(encoder, lambda: arena.stats().evictions > begun + 16)
    assert arena.stats().leased == 0
    put(arena, "a2")
    settled(p, "a1", "a2", request="a")
    assert p.pinned("a1") is not None and p.pinned("a2") is not None
