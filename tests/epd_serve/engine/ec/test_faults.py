"""What goes wrong between an encoder and its consumers, on a real arena and real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epd_serve import wire
from epd_serve.engine.ec.features import State
from store.arena import Arena
from tests.epd_serve.engine.ec.stages import Mouth, Stages, feature, needed, settled
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture
def encoder(stages: Stages) -> Iterator[Mouth]:
    """An encoder that says what the test tells it to."""
    mouth = Mouth(stages.events("E0"))
    yield mouth
    mouth.close()


def put(arena: Arena, key: str) -> wire.FeatureReady:
    arena.put(key, bytes(64), shape=(64,), dtype="uint8")
    return wire.FeatureReady(key, 64, "i", "here")


def test_a_consumer_that_restarted_after_the_event_finds_the_feature(stages: Stages) -> None:
    e, p = stages.producer(), stages.consumer()
    stages.heard(e, p)
    e.save({"k": feature()}, "k")
    wait_for(lambda: p.settled("r", ["k"]))
    p.close()
    stages.parts.remove(p)
    successor = stages.consumer(hears=False)
    settled(successor, "k")
    assert successor.pinned("k") is not None


def test_events_twice_and_out_of_order_change_nothing(stages: Stages, arena: Arena, encoder: Mouth) -> None:
    p = stages.consumer()
    first, second = put(arena, "a"), put(arena, "b")
    encoder.say_until(lambda: p.features.counters["events"] > 0, second)
    encoder.say(first, first, second, first, wire.FeaturePending(["a"], "i"))
    settled(p, "a", "b")
    encoder.say(first, second)
    assert p.settled("r", ["a", "b"])
    assert arena.stats().leased == 2


def test_an_event_after_the_recompute_pins_nothing(stages: Stages, arena: Arena, encoder: Mouth) -> None:
    p = stages.consumer(feature_wait_s=0.1)
    settled(p, "k")
    late = put(arena, "k")
    encoder.say_until(lambda: p.features.counters["events"] > 0, late)
    assert p.pinned("k") is None
    assert arena.stats().leased == 0
    p.release(["r"])
    settled(p, "k", request="s")
    assert p.pinned("k") is not None  # the next request takes it


def test_a_failure_does_not_hide_what_the_store_has(stages: Stages, arena: Arena, encoder: Mouth) -> None:
    p = stages.consumer()
    put(arena, "k")
    encoder.say_until(
        lambda: p.features._rows.get("k") is not None and p.features._rows["k"].state is State.LOST,
        wire.FeatureFailed("k", "one of two encoders"),
    )
    settled(p, "k")
    assert p.pinned("k") is not None


def test_a_dead_encoder_costs_its_consumers_one_deadline(stages: Stages) -> None:
    e, p = stages.producer(), stages.consumer(feature_wait_s=0.5)
    stages.heard(e, p)
    e.step(needed("k"), {})
    p.look_for(["k"])
    assert not p.settled("r", ["k"])
    e.close()
    stages.parts.remove(e)
    settled(p, "k")
    assert p.pinned("k") is None
    assert p.features.counters["recomputed.deadline"] == 1


def test_a_slow_encoder_that_renews_keeps_its_consumers_from_recomputing(stages: Stages) -> None:
    e, p = stages.producer(), stages.consumer(feature_wait_s=PATIENCE_S / 4)
    stages.heard(e, p)
    e.step(needed("k"), {})
    assert not p.settled("r", ["k"])
    for _ in range(3):
        before = p.features._rows["k"].deadline
        wait_for(lambda before=before: p.features._rows["k"].deadline > before)
    assert not p.settled("r", ["k"])
    e.save({"k": feature()}, "k")
    settled(p, "k")
    assert p.pinned("k") is not None
    assert not any(name.startswith("recomputed") for name in p.features.counters)


def test_few_requests_recompute_at_one_time_and_late_features_serve_the_others(stages: Stages, arena: Arena) -> None:
    p = stages.consumer(hears=False, feature_wait_s=0.1, recompute_limit=2)
    requests = [f"r{number}" for number in range(6)]

    def running() -> list[str]:
        return [request for request in requests if p.settled(request, [f"key of {request}"])]

    wait_for(lambda: running() and len(p.features.slots) == 6)
    assert running() == ["r0", "r1"]
    put(arena, "key of r4")
    wait_for(lambda: "r4" in running())
    assert p.pinned("key of r4") is not None
    p.release(["r0"])
    assert running() == ["r1", "r2", "r4"]
    p.features.passed("r1")
    requests.remove("r1")
    assert running() == ["r2", "r3", "r4"]
    p.release(["r3"])  # aborted
    requests.remove("r3")
    assert running() == ["r2", "r4", "r5"]
    assert p.features.counters["recomputed.deadline"] == 5


def test_a_request_that_must_not_recompute_is_announced_and_named_to_vllm_once(stages: Stages) -> None:
    p = stages.consumer(hears=False, feature_wait_s=0.1, publish=stages.events("P0"))
    ear = stages.ear("P0")
    wait_for(lambda: ear.of(wire.StoreReport))
    name = "chatcmpl-7f3a9c-1a2b3c4d"
    taken: list[str] = []

    def failed() -> bool:
        assert not p.settled(name, ["k"], must_not_recompute=True)
        taken.extend(p.take_failed())
        return bool(taken)

    wait_for(failed)
    assert not p.settled(name, ["k"], must_not_recompute=True)
    assert (taken, p.take_failed()) == ([name], set())
    p.features.ended(name)
    p.release([name])
    assert wait_for(lambda: ear.of(wire.FeatureMissing)) == [wire.FeatureMissing("7f3a9c", ["k"], "deadline")]
    wait_for(lambda: ear.of(wire.StoreReport)[-1].counters.get("failed.deadline") == 1)


def test_the_bell_rings_an_idle_scheduler_awake_when_a_feature_is_lost(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[bool] = []
    monkeypatch.setattr("epd_serve.engine.ec.listener.idle_waiter.wake", lambda: rings.append(True))
    p = stages.consumer(hears=False, feature_wait_s=0.1)
    settled(p, "k")
    wait_for(lambda: rings)


def test_reports_come_although_nothing_happens(stages: Stages) -> None:
    stages.consumer(hears=False, publish=stages.events("P0"))
    ear = stages.ear("P0")
    reports = wait_for(lambda: len(ear.of(wire.StoreReport)) > 1 and ear.of(wire.StoreReport))
    assert {report.instance for report in reports} == {"P0"}
    assert {report.pool for report in reports} == {"none"}
