"""Features of other hosts: fetched by threads of their own, bounded, with every failure named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epd_serve import wire
from epd_serve.engine.ec.features import FETCH_S
from epd_serve.engine.traffic import TrafficBoard
from epd_serve.roles import Role
from store.arena import Arena
from store.errors import CorruptFeatureError, StoreFullError, StoreUnavailableError
from tests.epd_serve.engine.ec.stages import (
    Mouth,
    Remote,
    Stages,
    TwoTiers,
    feature,
    is_ready,
    make_arena,
    settled,
)
from tests.waiting import wait_for


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def elsewhere() -> Iterator[Arena]:
    """The arena of the encoder's host."""
    made = make_arena("-elsewhere")
    yield made
    made.close()
    Arena.unlink(made.path)


@pytest.fixture
def encoder(stages: Stages) -> Iterator[Mouth]:
    mouth = Mouth(stages.events("E0"))
    yield mouth
    mouth.close()


GRID = {"image_grid_thw": [[1, 4, 4]]}


def ready(key: str, *, host: str = "there", pooled: bool = True, **metadata: Any) -> wire.FeatureReady:
    return wire.FeatureReady(key, 64, "i", host, pooled, metadata)


def has(remote: Remote, *keys: str) -> None:
    for key in keys:
        remote.features[key] = (bytes(64), (64,), "uint8")


def test_a_feature_crosses_hosts(stages: Stages, remote: Remote, elsewhere: Arena) -> None:
    e = stages.producer(pool=TwoTiers(elsewhere, remote), arena=str(elsewhere.path), arena_id="there")
    ear, p = stages.ear(), stages.consumer(pool=TwoTiers(stages.arena, remote))
    stages.heard(e, p)
    assert not p.settled("r", ["k"])
    e.save({"k": feature()}, "k")
    settled(p, "k")
    assert p.pinned("k") is not None
    events = wait_for(lambda: [event.pooled for event in ear.of(wire.FeatureReady, key="k")][-2:] == [False, True])
    assert events, "first for its own host, then for all"


def test_who_has_no_request_for_a_feature_fetches_nothing(stages: Stages, remote: Remote, encoder: Mouth) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote))
    has(remote, "k")
    encoder.say_until(lambda: p.features.counters["events"] > 3, ready("k", **GRID))
    assert remote.fetches == []
    settled(p, "k")


def test_an_event_from_elsewhere_fetches_for_a_request_that_has_arrived(
    stages: Stages, remote: Remote, encoder: Mouth
) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote))
    has(remote, "k", "other")
    p.look_for(["k"])
    encoder.say_until(lambda: is_ready(p, "k"), ready("other", **GRID), ready("k", **GRID))
    assert (set(remote.fetches), p.features.counters["prefetched"]) == ({"k"}, 1)
    assert p.settled("r", ["k"]), "at once"


def test_a_request_that_comes_after_the_event_has_its_feature_fetched_before_it_asks(
    stages: Stages, remote: Remote, encoder: Mouth
) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote))
    has(remote, "k")
    encoder.say_until(lambda: p.features.counters["events"] > 0, ready("k", **GRID))
    p.look_for(["k"])
    wait_for(lambda: is_ready(p, "k"))
    assert p.settled("r", ["k"])


def test_without_metadata_who_prefills_fetches_at_the_event_since_no_request_can_have_come(
    stages: Stages, remote: Remote, encoder: Mouth
) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote))
    has(remote, "k")
    encoder.say_until(lambda: stages.arena.contains("k"), ready("k"))
    wait_for(lambda: p.features.counters["prefetched"] == 1)  # counted after it is there, and not once it is asked for
    wait_for(lambda: p.settled("r", ["k"]))


def test_on_demand_nothing_is_fetched_before_a_request_needs_it(stages: Stages, remote: Remote, encoder: Mouth) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote), feature_prefetch="demand")
    has(remote, "k")
    p.look_for(["k"])
    encoder.say_until(lambda: p.features.counters["events"] > 3, ready("k"), ready("k", **GRID))
    assert remote.fetches == []
    settled(p, "k")
    assert remote.fetches == ["k"]


def test_without_a_second_tier_what_is_elsewhere_only_is_lost_at_once(stages: Stages, encoder: Mouth) -> None:
    p = stages.consumer()
    p.settled("r", ["k"])
    encoder.say_until(lambda: p.settled("r", ["k"]), ready("k", pooled=False))
    assert p.features.counters["recomputed.not_pooled"] == 1


def test_what_is_about_to_be_published_is_waited_for(stages: Stages, remote: Remote, encoder: Mouth) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote))
    p.settled("r", ["k"])
    encoder.say_until(lambda: p.features.counters["events"] > 0, ready("k", pooled=False))
    assert not p.settled("r", ["k"])
    has(remote, "k")
    encoder.say(ready("k"))
    settled(p, "k")
    assert p.pinned("k") is not None


def test_what_never_gets_published_is_lost_for_that_reason(stages: Stages, remote: Remote, encoder: Mouth) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote), feature_wait_s=0.3)
    p.settled("r", ["k"])
    encoder.say(ready("k", pooled=False))
    encoder.say_until(lambda: p.features.counters["events"] > 0, ready("k", pooled=False))
    settled(p, "k")
    assert p.features.counters["recomputed.not_pooled"] == 1


def test_a_lost_event_is_made_good_by_asking_the_second_tier(stages: Stages, remote: Remote) -> None:
    p = stages.consumer(hears=False, pool=TwoTiers(stages.arena, remote))
    began = time.monotonic()
    assert not p.settled("r", ["k"])
    wait_for(lambda: remote.fetches)
    has(remote, "k")
    settled(p, "k")
    assert p.pinned("k") is not None
    assert len(remote.fetches) <= 2 + (time.monotonic() - began) / FETCH_S, "asked over the network too often"


def test_a_second_tier_that_is_gone_is_told_apart_from_a_slow_encoder(stages: Stages, remote: Remote) -> None:
    remote.trouble = StoreUnavailableError("no answer")
    p = stages.consumer(hears=False, pool=TwoTiers(stages.arena, remote))
    settled(p, "k")
    assert p.features.counters["recomputed.unavailable"] == 1


def test_a_second_tier_that_is_gone_costs_nothing_that_this_host_has(stages: Stages, remote: Remote) -> None:
    remote.trouble, remote.state = StoreUnavailableError("no answer"), "down"
    e = stages.producer(pool=TwoTiers(stages.arena, remote))
    p = stages.consumer(pool=TwoTiers(stages.arena, remote))
    stages.heard(e, p)
    assert not p.settled("r", ["k"])
    e.save({"k": feature()}, "k")
    settled(p, "k")
    assert p.pinned("k") is not None


def test_a_feature_that_the_second_tier_has_wrong_is_lost_as_corrupt(stages: Stages, remote: Remote) -> None:
    remote.trouble = CorruptFeatureError("k")
    p = stages.consumer(hears=False, pool=TwoTiers(stages.arena, remote))
    settled(p, "k")
    assert p.features.counters["recomputed.corrupt"] == 1
    assert p.features.counters["corrupt"] == p.features.counters["fetch_corrupt"] > 0


def test_a_feature_corrupt_here_is_fetched_from_the_second_tier(stages: Stages, remote: Remote, arena: Arena) -> None:
    has(remote, "k")
    arena.put("k", np.ones(64, np.uint8), shape=(64,), dtype="uint8")
    with arena.lease("k") as lease:  # type: ignore[union-attr]
        arena.memory()[lease.offset] ^= 255
    p = stages.consumer(hears=False, pool=TwoTiers(arena, remote))
    settled(p, "k")
    assert p.pinned("k") is not None


def test_a_full_arena_is_back_pressure_that_is_shown_and_ends_when_leases_go(
    stages: Stages, remote: Remote, arena: Arena
) -> None:
    has(remote, "k")
    remote.trouble = StoreFullError("full")
    p = stages.consumer(hears=False, pool=TwoTiers(arena, remote), publish=stages.events("P0"))
    ear = stages.ear("P0")
    assert not p.settled("r", ["k"])
    wait_for(lambda: ear.of(wire.StoreReport, waiting_puts=1))
    remote.trouble = None
    settled(p, "k")
    wait_for(lambda: ear.of(wire.StoreReport)[-1].waiting_puts == 0)


def test_a_full_arena_is_waited_for_until_the_deadline_only(stages: Stages, remote: Remote, arena: Arena) -> None:
    remote.trouble = StoreFullError("full")
    p = stages.consumer(hears=False, pool=TwoTiers(arena, remote), feature_wait_s=0.3)
    settled(p, "k")
    assert p.features.counters["recomputed.no_room"] == 1


def test_a_slow_fetch_holds_up_no_other_feature(stages: Stages, remote: Remote, arena: Arena) -> None:
    has(remote, "slow")
    remote.gate.clear()
    p = stages.consumer(hears=False, pool=TwoTiers(arena, remote))
    try:
        assert not p.settled("r", ["slow"])
        wait_for(lambda: remote.fetches)
        arena.put("here", np.ones(64, np.uint8), shape=(64,), dtype="uint8")
        settled(p, "here", request="s")
        assert not p.settled("r", ["slow"])
    finally:
        remote.gate.set()
    settled(p, "slow")
    assert remote.fetches.count("slow") == 1, "fetched twice at one time"


def test_links_are_told_of_a_fetch_while_it_lasts(stages: Stages, remote: Remote, tmp_path: Path) -> None:
    has(remote, "k")
    remote.gate.clear()
    board = TrafficBoard(str(tmp_path / "P0.traffic"))
    p = stages.consumer(hears=False, pool=TwoTiers(stages.arena, remote), traffic=str(tmp_path / "P0.traffic"))
    try:
        assert not p.settled("r", ["k"])
        wait_for(lambda: remote.fetches)
        assert board.quiet_until(time.monotonic()) > time.monotonic()
    finally:
        remote.gate.set()
    settled(p, "k")
    wait_for(lambda: board.quiet_until(time.monotonic()) < time.monotonic())


def test_a_fetch_whose_request_has_gone_is_never_begun(stages: Stages, remote: Remote, arena: Arena) -> None:
    remote.gate.clear()
    p = stages.consumer(hears=False, pool=TwoTiers(arena, remote))
    try:
        for key in ("a", "b", "c", "gone"):
            p.settled(f"request {key}", [key])
        wait_for(lambda: len(remote.fetches) == 3)
        p.release(["request gone"])
    finally:
        remote.gate.set()
    wait_for(lambda: remote.fetches.count("a") >= 2)  # asked again, half a second later
    assert "gone" not in remote.fetches


def test_a_decoder_fetches_what_it_needs_and_prefetches_nothing(stages: Stages, remote: Remote, encoder: Mouth) -> None:
    d = stages.consumer(pool=TwoTiers(stages.arena, remote), role=Role.D)
    has(remote, "k")
    encoder.say_until(lambda: d.features.counters["events"] > 3, ready("k"))
    assert remote.fetches == []
    settled(d, "k")


def test_a_prefill_that_takes_over_from_a_dead_one_fetches_what_it_had_only_heard_of(
    stages: Stages, remote: Remote, encoder: Mouth
) -> None:
    """Both heard of the feature, on hosts of their own; P0 dies with it, and the request comes again, to P1."""
    arenas = [make_arena(f"-P{number}") for number in range(2)]
    try:
        pools = [TwoTiers(arena, remote) for arena in arenas]
        dies, heir = (stages.consumer(pool=pool, arena_id=f"host {at}") for at, pool in enumerate(pools))
        has(remote, "k")
        dies.look_for(["k"])
        encoder.say_until(lambda: is_ready(dies, "k") and heir.features.counters["events"], ready("k", **GRID))
        assert (remote.fetches, arenas[1].contains("k")) == (["k"], False)
        assert dies.settled("r", ["k"])
        stages.parts.remove(dies)
        dies.close()
        heir.look_for(["k"])
        wait_for(lambda: is_ready(heir, "k"))
        assert heir.settled("r", ["k"])
        assert remote.fetches == ["k", "k"]
    finally:
        stages.close()
        for arena in arenas:
            arena.close()
            Arena.unlink(arena.path)


def test_a_prefill_that_has_just_started_finds_what_it_never_heard_of(stages: Stages, remote: Remote) -> None:
    p = stages.consumer(pool=TwoTiers(stages.arena, remote))
    has(remote, "k")
    p.look_for(["k"])
    settled(p, "k")
    assert p.pinned("k") is not None
