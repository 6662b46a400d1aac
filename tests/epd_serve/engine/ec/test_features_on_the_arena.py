"""E's writer and P's listener on a real arena and real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from epd_serve import wire
from epd_serve.engine.ec.features import State
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from npu_ops.torch_memory import HostMemory
from store.arena import Arena
from store.errors import StoreError
from store.feature_pool import open_pool
from store.keys import feature_key
from tests.epd_serve.engine.ec.stages import CAPACITY, Mouth, Stages, feature, is_ready, needed, settled
from tests.waiting import PATIENCE_S, wait_for

PAGE = 4096  # the least that a feature takes of an arena


def test_a_feature_reaches_the_consumer_bit_by_bit(stages: Stages, arena: Arena) -> None:
    e, p = stages.producer(), stages.consumer()
    stages.heard(e, p)
    made = feature()
    assert not p.settled("r", ["k"])
    assert p.waiting()
    e.save({"k": made}, "k")
    settled(p, "k")
    lease = p.pinned("k")
    assert lease is not None
    assert (lease.meta.shape, lease.meta.dtype) == ((8, 16), "bfloat16")
    raw = torch.from_numpy(np.frombuffer(arena.view(lease.offset, lease.meta.nbytes), np.uint8).copy())
    assert torch.equal(raw.view(torch.bfloat16).view(8, 16), made)
    assert not p.waiting()


def test_a_tenant_with_many_images_leaves_another_its_own(stages: Stages, arena: Arena) -> None:
    def key(tenant: str, number: int) -> str:
        model = {"model": "m", "revision": "r", "dtype": "d", "modality": "image"}
        return feature_key(bytes([number]), processor_options={}, tenant=tenant, **model)

    e = stages.producer(pool=open_pool(arena=str(arena.path)))  # one that spares nothing
    quiet = [key("quiet", number) for number in range(3)]
    for name in quiet:
        e.save({name: feature()}, name)
    loud = [key("loud", number) for number in range(2 * CAPACITY // PAGE)]
    for name in loud:
        e.save({name: feature()}, name)
    wait_for(lambda: arena.contains(loud[-1]))
    assert [arena.contains(name) for name in quiet] == [True] * 3
    assert [arena.contains(name) for name in loud] == [False] * 19 + [True] * 13


@pytest.mark.parametrize("ahead", [True, False])
def test_an_event_prefetches_what_a_request_will_ask_for(stages: Stages, ahead: bool) -> None:
    e, p = stages.producer(), stages.consumer()
    stages.heard(e, p)
    if ahead:  # it was called while the encoder was at work
        e.step(needed("k", image_grid_thw=[[1, 4, 4]]), {})
        p.look_for(["k"])
    e.save({"k": feature()}, "k")
    wait_for(lambda: is_ready(p, "k"))
    assert p.pinned("k") is None  # here, but promised to nobody
    assert p.settled("r", ["k"])
    assert p.pinned("k") is not None


def test_a_lost_event_is_made_good_by_looking_again(stages: Stages) -> None:
    e, p = stages.producer(), stages.consumer(hears=False)
    assert not p.settled("r", ["k"])
    e.save({"k": feature()}, "k")
    settled(p, "k")
    assert p.pinned("k") is not None


def test_a_feature_that_is_there_already_needs_no_event(stages: Stages, arena: Arena) -> None:
    arena.put("k", np.ones(64, np.uint8), shape=(64,), dtype="uint8")
    p = stages.consumer(hears=False)
    settled(p, "k")
    assert p.pinned("k") is not None


def test_a_corrupt_feature_is_lost_and_never_promised(stages: Stages, arena: Arena) -> None:
    arena.put("k", np.ones(64, np.uint8), shape=(64,), dtype="uint8")
    with arena.lease("k") as lease:  # type: ignore[union-attr]
        arena.memory()[lease.offset] ^= 255
    p = stages.consumer(hears=False)
    assert p._report().counters == {"corrupt": 0}, "an alert on its increase needs a first value"
    settled(p, "k")
    assert p.pinned("k") is None
    assert p.features.counters["lost.corrupt"] == 1
    assert p._report().counters["corrupt"] == 1
    assert arena.stats().corrupt == 1


def test_a_feature_that_never_comes_is_lost_at_the_deadline(stages: Stages) -> None:
    p = stages.consumer(hears=False, feature_wait_s=0.1)
    assert not p.settled("r", ["k"])
    settled(p, "k")
    assert p.pinned("k") is None


def test_what_the_proxy_says_was_not_encoded_is_lost_at_once(stages: Stages) -> None:
    p = stages.consumer(hears=False)
    assert not p.settled("r", ["k"])
    p.give_up(["k"], "not encoded")
    settled(p, "k")  # after one more look into the store
    assert p.pinned("k") is None


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_full_arena_is_told_at_once(stages: Stages, arena: Arena, asks_first: bool) -> None:
    e, p = stages.producer(), stages.consumer()
    stages.heard(e, p)
    if asks_first:
        assert not p.settled("r", ["big"])
    e.save({"big": torch.zeros(CAPACITY + 1, dtype=torch.uint8)}, "big")
    if not asks_first:
        wait_for(lambda: "big" in p.features._rows and p.features._rows["big"].state is State.LOST)
    settled(p, "big")
    assert p.pinned("big") is None
    assert p.features.counters["lost.encoder"] == 1


def test_pins_go_with_the_last_request(stages: Stages, arena: Arena) -> None:
    arena.put("k", np.ones(64, np.uint8), shape=(64,), dtype="uint8")
    p = stages.consumer(hears=False)
    settled(p, "k", request="r")
    settled(p, "k", request="s")
    p.release(["r"])
    assert p.pinned("k") is not None
    assert arena.stats().leased == 1
    p.release(["s", "unknown"])
    assert p.pinned("k") is None
    wait_for(lambda: arena.stats().leased == 0)


def test_an_item_in_the_encoders_cache_is_announced_again_and_put_again_when_evicted(
    stages: Stages, arena: Arena
) -> None:
    e = stages.producer()
    cache = {"k": feature()}
    e.save(cache, "k")
    wait_for(lambda: arena.contains("k"))
    assert arena.remove("k")
    e.step(needed("k", "never encoded"), cache)
    wait_for(lambda: arena.contains("k"))
    puts = arena.stats().puts
    p = stages.consumer()
    assert p.settled("r", ["never encoded"]) is None

    def heard_again() -> bool:
        e.step(needed("k"), cache)
        return is_ready(p, "k")

    wait_for(heard_again)
    assert arena.stats().puts == puts  # still there: not put twice


def test_the_writer_waits_until_the_device_has_written(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device: the feature's bytes are there only after its fence."""
    made, written = torch.zeros(4), threading.Event()

    def fence(memory: HostMemory) -> Callable[[], None]:
        def wait() -> None:
            assert written.wait(PATIENCE_S)

        return wait

    monkeypatch.setattr(HostMemory, "fence", fence)
    e, p = stages.producer(), stages.consumer(hears=False)
    e.save({"k": made}, "k")
    assert not p.settled("r", ["k"])
    made.fill_(7)
    written.set()
    settled(p, "k")
    lease = p.pinned("k")
    assert lease is not None
    assert np.frombuffer(stages.arena.view(lease.offset, lease.meta.nbytes), np.float32).tolist() == [7.0] * 4


def test_one_bad_feature_does_not_end_the_writer(stages: Stages, arena: Arena) -> None:
    e = stages.producer()
    e.save({"bad": torch.zeros(2, 2).to_sparse()}, "bad")
    e.save({"good": feature()}, "good")
    wait_for(lambda: arena.contains("good"))


def test_an_encoder_whose_address_cannot_be_bound_does_not_start(arena: Arena, tmp_path: Path) -> None:
    wiring = StageWiring("E0", Role.E, "i", arena=str(arena.path), publish=f"ipc://{tmp_path}/no/such/folder")
    with pytest.raises(zmq.ZMQError):
        FeatureProducer(wiring)


def test_a_store_that_does_not_answer_does_not_end_the_listener(stages: Stages) -> None:
    e, p = stages.producer(), stages.consumer(hears=False)
    lease, failures = p._pool.arena.lease, [StoreError("lock"), StoreError("lock")]

    def flaky(key: str, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return lease(key, **more)

    p._pool.arena.lease = flaky  # type: ignore[assignment,method-assign]
    e.save({"k": feature()}, "k")
    settled(p, "k")
    assert p.pinned("k") is not None
    assert not failures


def test_a_malformed_event_is_ignored(stages: Stages, tmp_path: Path) -> None:
    publisher = zmq.Context.instance().socket(zmq.PUB)
    publisher.bind(f"ipc://{tmp_path}/E0.events")
    p = stages.consumer()
    try:
        p.settled("r", ["k"])

        def lost() -> bool:
            publisher.send(b"\xff")
            publisher.send(wire.encode(wire.FeatureFailed("k", "full")))
            return p.settled("r", ["k"]) is not None

        wait_for(lost)
    finally:
        publisher.close(linger=0)


def test_a_running_consumer_hears_an_encoder_that_comes_in_place_of_another(stages: Stages) -> None:
    p = stages.consumer(hears=False)
    mouths = {name: Mouth(stages.events(name)) for name in ("E0", "E1")}

    def tell(name: str) -> None:
        write_peers(stages.folder / "P0.peers.json", [Peer(name, Role.E, events=stages.events(name))])

    try:
        for name in mouths:
            key = f"of {name}"
            p.settled(key, [key])
            tell(name)
            mouths[name].say_until(lambda key=key: p.settled(key, [key]) is not None, wire.FeatureFailed(key, "full"))
    finally:
        for mouth in mouths.values():
            mouth.close()
