"""An encoder: what it skips, repeats, renews and reports, and what it never does: answer without a feature."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from epd_serve import wire
from epd_serve.engine.ec import producer
from epd_serve.engine.ec.encoder_scheduler import EncoderScheduler
from epd_serve.engine.ec.step import FeatureStep
from epd_serve.engine.ec.store_access import open_local_store
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from store.arena import Arena
from store.feature_pool import FeaturePool
from tests.epd_serve.engine.ec.stages import CAPACITY, Speechless, Stages, feature, needed
from tests.waiting import PATIENCE_S, wait_for

GRID = {"image_grid_thw": [[1, 4, 4]]}


def request(name: str, *keys: str, grid: bool = True, again: str = "") -> Any:
    features = [
        SimpleNamespace(identifier=key, mm_position=SimpleNamespace(offset=0, length=1), grid=grid) for key in keys
    ]
    extra = {"epd_encode_again": again} if again else None
    return SimpleNamespace(request_id=name, mm_features=features, sampling_params=SimpleNamespace(extra_args=extra))


def collect(features: list[Any]) -> dict[str, dict[str, Any]]:
    return {
        feature.identifier: {"item_indices": [index], "metadata": dict(GRID) if feature.grid else {}}
        for index, feature in enumerate(features)
    }


@pytest.fixture
def scheduler(arena: Arena) -> Any:
    made = EncoderScheduler(FeaturePool(Arena.attach(arena.path)), collect)
    yield made
    made.close()


def put(arena: Arena, key: str) -> None:
    arena.put(key, np.arange(64, dtype=np.uint8), shape=(64,), dtype="uint8")


# --- scheduler side ---------------------------------------------------------------------------------------------------


def test_what_the_store_has_is_loaded_instead_of_encoded(scheduler: EncoderScheduler, arena: Arena) -> None:
    put(arena, "k")
    asked = request("r", "k", "new")
    scheduler.may_run(asked, 0)
    assert (scheduler.has("k"), scheduler.has("new")) == (True, False)
    scheduler.allocated(asked, "k")
    scheduler.allocated(asked, "new")
    step = scheduler.step([])
    assert [slot.key for slot in step.loads] == ["k"]
    assert [item.key for item in step.needed] == ["k", "new"]
    assert step.held == ["k", "new"]
    assert arena.stats().leased == 1, "evictable before the worker has loaded it"
    scheduler.step(["r"])
    assert arena.stats().leased == 0


def test_an_offer_that_vllm_had_no_room_for_is_not_kept(scheduler: EncoderScheduler, arena: Arena) -> None:
    put(arena, "k")
    scheduler.may_run(request("r", "k"), 0)
    assert scheduler.has("k")
    assert scheduler.step([]).loads == []
    assert arena.stats().leased == 0


def test_a_pin_that_met_a_stuck_lock_goes_back_by_itself(arena: Arena) -> None:
    pool = FeaturePool(Arena.attach(arena.path, lock_timeout_s=0.05))
    scheduler = EncoderScheduler(pool, collect)
    for key in ("a", "b"):
        put(arena, key)
        scheduler.may_run(request(key, key), 0)
        assert scheduler.has(key)
    with arena._index():
        begun = time.monotonic()
        scheduler.step([])
        assert time.monotonic() < begun + 0.05, "vLLM's scheduler does not wait for the lock"
    wait_for(lambda: not arena.stats().leased)
    scheduler.close()


def test_a_neighbour_that_holds_the_stores_lock_costs_an_encode_and_keeps_no_step_waiting(arena: Arena) -> None:
    pool = open_local_store(StageWiring("E0", Role.E, "1", arena=str(arena.path)))
    scheduler = EncoderScheduler(pool, collect)
    for key in ("a", "b", "c"):
        put(arena, key)
    scheduler.may_run(request("r", "a", "b", "c"), 0)
    assert scheduler.has("a")
    began = time.monotonic()
    with arena._index():
        assert not scheduler.has("b") and not scheduler.has("c")
        assert scheduler.step(["r"]).loads == []
    assert time.monotonic() - began < 1, "vLLM's thread waited for its neighbour"
    assert scheduler.has("b"), "the next step asks the store again"
    scheduler.step([])
    assert arena.stats().leased == 0
    scheduler.close()


def test_a_corrupt_feature_is_encoded(scheduler: EncoderScheduler, arena: Arena) -> None:
    put(arena, "k")
    with arena.lease("k") as lease:  # type: ignore[union-attr]
        arena.memory()[lease.offset] ^= 255
    assert not scheduler.has("k")


def test_the_stores_word_is_not_taken_for_what_a_consumer_could_not_get(
    scheduler: EncoderScheduler, arena: Arena
) -> None:
    put(arena, "k")
    asked = request("r", "k", again="k")
    scheduler.may_run(asked, 0)
    assert not scheduler.has("k")
    assert [item.again for item in scheduler.step([]).needed] == [True]
    scheduler.finished(asked, served=True)
    assert scheduler.has("k")


def test_metadata_is_remembered_when_vllm_has_dropped_it(scheduler: EncoderScheduler) -> None:
    first, again = request("r", "k"), request("s", "k", grid=False)
    scheduler.may_run(first, 0)
    assert scheduler.finished(first, served=True) == {"k": {"item_indices": [0], "metadata": GRID}}
    scheduler.may_run(again, 0)
    assert [item.metadata for item in scheduler.step([]).needed] == [GRID, GRID]
    assert scheduler.finished(again, served=True)["k"]["metadata"] == GRID


def test_an_aborted_request_is_held_no_longer_and_owes_nothing(scheduler: EncoderScheduler) -> None:
    served, aborted = request("r", "a"), request("s", "b")
    scheduler.may_run(served, 0), scheduler.may_run(aborted, 0)
    scheduler.step([])
    scheduler.finished(served, served=True), scheduler.finished(aborted, served=False)
    step = scheduler.step(["r", "s"])
    assert (step.ended, step.held) == (["a"], [])


# --- worker side ------------------------------------------------------------------------------------------------------


def test_announcements_carry_the_host_and_the_metadata(stages: Stages) -> None:
    e, ear = stages.producer(), stages.ear()
    wait_for(lambda: ear.of(wire.StoreReport))
    made = feature()
    e.step(needed("k", **GRID), {})
    e.save({"k": made}, "k")
    (event,) = wait_for(lambda: ear.of(wire.FeatureReady))
    assert event == wire.FeatureReady("k", made.nbytes, "i", "here", False, GRID)
    wait_for(lambda: ear.of(wire.StoreReport)[-1].counters.get("put") == 1)
    assert ear.of(wire.StoreReport)[-1].counters["encoded"] == 1


def test_what_is_about_to_be_encoded_is_announced_with_its_metadata_before_anything_comes_of_it(
    stages: Stages, arena: Arena
) -> None:
    e, ear = stages.producer(), stages.ear()
    wait_for(lambda: ear.of(wire.StoreReport))
    cached = feature()
    e.step(needed("new", **GRID), {})
    wait_for(lambda: ear.of(wire.FeatureExpected, items={"new": GRID}, incarnation="i"))
    e.step(needed("cached", **GRID), {"cached": cached})
    e.step(needed("unknown"), {})  # a modality whose metadata nobody can say
    wait_for(lambda: ear.of(wire.FeatureReady, key="cached"))
    kinds = [type(event) for event in ear.listen() if isinstance(event, wire.FeatureExpected | wire.FeatureReady)]
    assert kinds == [wire.FeatureExpected, wire.FeatureExpected, wire.FeatureReady]


def test_what_is_queued_is_renewed_until_it_is_announced(stages: Stages) -> None:
    e, ear = stages.producer(), stages.ear()
    e.step(needed("a", "b"), {})
    wait_for(lambda: [set(event.keys) for event in ear.of(wire.FeaturePending)[-2:]] == [{"a", "b"}] * 2)
    wait_for(lambda: ear.of(wire.StoreReport, encoding=2))
    e.save({"a": feature()}, "a")
    wait_for(lambda: ear.of(wire.FeaturePending)[-1].keys == ["b"])
    e.step(FeatureStep(), {})  # the other request was aborted
    wait_for(lambda: ear.of(wire.StoreReport)[-1].encoding == 0)
    renewed, reports = len(ear.of(wire.FeaturePending)), len(ear.of(wire.StoreReport))
    wait_for(lambda: len(ear.of(wire.StoreReport)) > reports)
    assert len(ear.of(wire.FeaturePending)) == renewed


def test_a_skipped_item_is_in_the_encoders_cache_afterwards(stages: Stages, arena: Arena) -> None:
    """Or vLLM's cache manager would believe so, and nobody could ever get the item from this encoder again."""
    e, ear, cache = stages.producer(), stages.ear(), {}  # type: ignore[var-annotated]
    wait_for(lambda: ear.of(wire.StoreReport))
    scheduler = EncoderScheduler(FeaturePool(Arena.attach(arena.path)), collect)
    put(arena, "k")
    asked = request("r", "k")
    scheduler.may_run(asked, 0)
    assert scheduler.has("k")
    scheduler.allocated(asked, "k")
    e.step(scheduler.step([]), cache)
    scheduler.step(["r"])
    scheduler.close()
    assert torch.equal(cache["k"], torch.arange(64, dtype=torch.uint8))
    assert wait_for(lambda: ear.of(wire.FeatureReady, key="k"))[0].metadata == GRID
    wait_for(lambda: ear.of(wire.StoreReport)[-1].counters.get("encode_skipped") == 1)
    assert arena.remove("k")
    e.step(needed("k"), cache)  # vLLM finds it in its cache and encodes nothing
    wait_for(lambda: arena.contains("k"))


def test_a_request_that_is_served_without_its_item_is_a_failure_not_a_silence(stages: Stages) -> None:
    e, ear = stages.producer(), stages.ear()
    wait_for(lambda: ear.of(wire.StoreReport))
    e.step(needed("k"), {})
    e.step(FeatureStep(ended=["k"]), {})
    wait_for(lambda: ear.of(wire.FeatureFailed, key="k"))


def test_a_served_item_that_only_the_store_has_is_announced(stages: Stages, arena: Arena) -> None:
    e, ear = stages.producer(), stages.ear()
    wait_for(lambda: ear.of(wire.StoreReport))
    e.step(needed("k"), {})
    put(arena, "k")
    e.step(FeatureStep(ended=["k"]), {})
    wait_for(lambda: ear.of(wire.FeatureReady, key="k"))
    assert not ear.of(wire.FeatureFailed)


def test_an_aborted_request_fails_nothing(stages: Stages) -> None:
    e, ear = stages.producer(), stages.ear()
    wait_for(lambda: ear.of(wire.StoreReport))
    e.step(needed("k"), {})
    e.step(FeatureStep(), {})
    e.save({"next": feature()}, "next")
    wait_for(lambda: ear.of(wire.FeatureReady, key="next"))
    assert not ear.of(wire.FeatureFailed)


@pytest.mark.parametrize("cached", [True, False])
def test_what_a_consumer_could_not_get_is_put_anew(stages: Stages, arena: Arena, cached: bool) -> None:
    e, ear, made = stages.producer(), stages.ear(), feature()
    wait_for(lambda: ear.of(wire.StoreReport))
    put(arena, "k")  # wrong bytes, under a valid checksum
    cache = {"k": made} if cached else {}
    e.step(needed("k", again=True), cache)
    if not cached:
        e.save({"k": made}, "k")
    wait_for(lambda: ear.of(wire.FeatureReady, key="k"))
    with arena.lease("k") as lease:  # type: ignore[union-attr]
        assert lease.meta.shape == (8, 16)
    wait_for(lambda: ear.of(wire.StoreReport)[-1].counters.get("reencode_requested") == 1)


def test_a_full_store_is_waited_for_and_shown(stages: Stages, arena: Arena) -> None:
    e, ear = stages.producer(), stages.ear()
    arena.put("big", np.zeros(CAPACITY, np.uint8), shape=(CAPACITY,), dtype="uint8")
    lease = arena.lease("big")
    assert lease is not None
    e.step(needed("a", "b"), {})
    e.save({"a": feature()}, "a")
    e.save({"b": feature()}, "b")
    wait_for(lambda: ear.of(wire.StoreReport, waiting_puts=2))
    wait_for(lambda: ear.of(wire.FeaturePending)[-1:] and set(ear.of(wire.FeaturePending)[-1].keys) == {"a", "b"})
    lease.release()
    wait_for(lambda: arena.contains("a") and arena.contains("b"))
    wait_for(lambda: ear.of(wire.StoreReport)[-1].waiting_puts == 0)
    assert not ear.of(wire.FeatureFailed)


def test_what_another_process_is_still_writing_is_not_announced(
    stages: Stages, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_OTHER_WRITER_S", PATIENCE_S)
    e, ear = stages.producer(), stages.ear()
    wait_for(lambda: ear.of(wire.StoreReport))
    room = arena.reserve("k", 64)  # a consumer of this host fetches it from the second tier
    assert room is not None
    e.save({"k": feature()}, "k")
    wait_for(lambda: ear.of(wire.FeaturePending)[-1:] and "k" in ear.of(wire.FeaturePending)[-1].keys)
    assert not ear.of(wire.FeatureReady)
    room.abandon()  # and does not get it
    wait_for(lambda: ear.of(wire.FeatureReady, key="k"))
    assert arena.contains("k")


def test_a_store_that_stays_full_keeps_nobody_waiting(
    stages: Stages, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_RENEWED_WHILE_FULL_S", PATIENCE_S)
    e, ear = stages.producer(), stages.ear()
    arena.put("big", np.zeros(CAPACITY, np.uint8), shape=(CAPACITY,), dtype="uint8")
    with arena.lease("big"):  # type: ignore[union-attr]
        e.save({"k": feature()}, "k")  # its request has been answered
        wait_for(lambda: ear.of(wire.StoreReport, waiting_puts=1) and e._pending() == ["k"])
        monkeypatch.setattr(producer, "_RENEWED_WHILE_FULL_S", 0.0)
        wait_for(lambda: e._pending() == [])
        assert e._report().waiting_puts == 1
    wait_for(lambda: ear.of(wire.FeatureReady, key="k"))


def test_a_feature_that_finds_no_room_in_the_queue_is_dropped_and_told_so_that_it_is_recomputed(
    stages: Stages, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(producer.FeatureProducer.__init__.__kwdefaults__, "stall_s", 0.05)
    e, ear = stages.producer(feature_queue_bytes=2 * feature().nbytes), stages.ear()
    arena.put("big", np.zeros(CAPACITY, np.uint8), shape=(CAPACITY,), dtype="uint8")
    with arena.lease("big"):  # type: ignore[union-attr]
        wait_for(lambda: ear.of(wire.StoreReport))
        for key in "abc":  # the store is full: two are kept, and the model's thread goes on with the third
            e.save({key: feature()}, key)
        wait_for(lambda: ear.of(wire.FeatureFailed, key="c"))
        wait_for(lambda: ear.of(wire.StoreReport)[-1].counters.get("put_dropped") == 1)
        assert not ear.of(wire.FeatureFailed, key="a")
    wait_for(lambda: arena.contains("a") and arena.contains("b"))
    assert not arena.contains("c")
    e.save({"c": feature()}, "c")
    wait_for(lambda: ear.of(wire.FeatureReady, key="c"))


def test_a_store_that_stays_full_is_told_after_the_put_deadline(
    stages: Stages, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    writer = Speechless(
        FeaturePool(Arena.attach(arena.path)),
        lambda key, event, nbytes=0, *, pooled=False, reason="": told.append((event, reason)),
        put_timeout_s=0.1,
    )
    arena.put("big", np.zeros(CAPACITY, np.uint8), shape=(CAPACITY,), dtype="uint8")
    with arena.lease("big"):  # type: ignore[union-attr]
        writer.put("k", feature())
        wait_for(lambda: len(told) == 2)
    assert [event for event, _ in told] == ["put_waited", "put_failed"]
    assert told[1][1]
    writer.close()


def test_the_writer_keeps_no_memory_of_a_feature_that_it_is_done_with(arena: Arena) -> None:
    told: list[str] = []
    writer = Speechless(
        FeaturePool(Arena.attach(arena.path)),
        lambda key, event, nbytes=0, *, pooled=False, reason="": told.append(event),
    )
    encoded = feature()
    memory = weakref.ref(encoded)
    writer.put("k", encoded)
    del encoded
    wait_for(lambda: told == ["put"] and not writer._pending())
    wait_for(lambda: memory() is None)
    writer.close()
