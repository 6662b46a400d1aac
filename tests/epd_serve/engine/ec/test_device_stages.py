"""An encoder and a consumer wired for the device path, with Mooncake over TCP between them; host memory is theirs.

What the stages are made of is the real thing, down to the agents of two workers; only vLLM is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from deploy.host.ports import free_ports
from epd_serve import wire
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.device_ledger import DevicePin
from epd_serve.engine.ec.feature_source import Held
from epd_serve.engine.ec.loading import FeatureReader, load
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.step import FeatureSlot
from epd_serve.engine.ec.store_access import open_reader
from epd_serve.roles import Role
from store.arena import Arena
from store.arena.lease import Lease
from store.mooncake.master import MasterSettings, rpc_address
from tests.epd_serve.engine.ec.conftest import running_master
from tests.epd_serve.engine.ec.stages import Stages, close_all, feature, needed, settled
from tests.waiting import wait_for

pytestmark = pytest.mark.mooncake
RANKS = 2
SLAB = 64 << 10


class Pair:
    """E0 and P0 of one launch, P0 with two workers."""

    def __init__(self, stages: Stages, master: str) -> None:
        self.stages = stages
        self.common = {"feature_path": "device", "mooncake_master": master, "feature_slab_bytes": SLAB}
        self.agents = f"ipc://{stages.folder}/P0.features{{rank}}"
        self.readers: list[FeatureReader] = []

    def producer(self, *consumers: str, **more: Any) -> FeatureProducer:
        hears = {name: self.stages.events(name) for name in consumers or ("P0",)}
        return self.stages.producer(hears=hears, **{**self.common, "mooncake_segment_bytes": 32 << 20, **more})

    def consumer(self, workers_life: str = "i", **more: Any) -> FeatureConsumer:
        """Its workers first, as vLLM starts them."""
        wiring = self.stages.wiring("P0", Role.P, {}, **self.common, feature_worker_endpoint=self.agents)
        self.readers += [open_reader(replace(wiring, incarnation=workers_life), "cpu", rank) for rank in range(RANKS)]
        ways = {**self.common, "feature_worker_endpoint": self.agents, "publish": self.stages.events("P0"), **more}
        return self.stages.consumer(ranks=RANKS, **ways)

    def loaded(self, p: FeatureConsumer, key: str) -> list[torch.Tensor]:
        """What each worker loads of a feature that is promised."""
        held = p.pinned(key)
        assert held is not None
        caches: list[dict[str, torch.Tensor]] = [{} for _ in self.readers]
        for reader, cache in zip(self.readers, caches, strict=True):
            assert [slot.key for slot in load(reader, [FeatureSlot.of(held)], cache)] == [key]
        return [cache[key] for cache in caches]

    def close(self) -> None:
        close_all([self.stages, *self.readers])


@pytest.fixture
def pair(stages: Stages, master: str) -> Iterator[Pair]:
    made = Pair(stages, master)
    yield made
    made.close()


def saved(e: FeatureProducer, key: str, rows: int = 8) -> torch.Tensor:
    made = feature(rows)
    e.save({key: made}, key)
    return made


def arrived(p: FeatureConsumer, key: str, request: str = "r") -> Held:
    settled(p, key, request=request)
    held = p.pinned(key)
    assert held is not None, p._desk.counters
    return held


def reached(e: FeatureProducer) -> bool:
    wait_for(lambda: not e._direct.arena_needed)
    return e._direct.path == "device"


def test_a_feature_goes_into_the_memory_of_all_workers_and_past_the_arena(pair: Pair, arena: Arena) -> None:
    e, p = pair.producer(), pair.consumer()
    assert reached(e)
    made = saved(e, "k")
    assert isinstance(arrived(p, "k"), DevicePin)
    assert all(torch.equal(loaded, made) for loaded in pair.loaded(p, "k"))
    assert not arena.contains("k")
    p.release(["r"])
    wait_for(lambda: p._source._device.features.pinned_bytes() == 0)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_one_that_is_there_already_is_pinned_again_without_a_fetch(pair: Pair) -> None:
    e, p = pair.producer(), pair.consumer()
    assert reached(e)
    made = saved(e, "k")
    arrived(p, "k")
    p.release(["r"])
    fetched = p._source.counters()["device.fetched"]
    assert isinstance(arrived(p, "k", request="another"), DevicePin)
    assert all(torch.equal(loaded, made) for loaded in pair.loaded(p, "k"))
    assert p._source.counters()["device.fetched"] == fetched


def test_while_a_consumer_has_not_said_that_it_reaches_the_encoder_the_arena_has_it_too(
    pair: Pair, arena: Arena
) -> None:
    e, p = pair.producer("P0", "P1"), pair.consumer()
    wait_for(lambda: p._source.counters().get("path.device"))
    made = saved(e, "k")
    arrived(p, "k")
    assert all(torch.equal(loaded, made) for loaded in pair.loaded(p, "k"))
    wait_for(lambda: arena.contains("k"))
    assert e._direct.arena_needed


def test_a_consumer_whose_workers_cannot_take_it_gets_it_from_the_arena(pair: Pair) -> None:
    e, p = pair.producer(), pair.consumer(workers_life="another")
    wait_for(lambda: p._source.counters().get("path.arena"))
    made = saved(e, "k")
    assert isinstance(arrived(p, "k"), Lease)
    assert all(torch.equal(loaded, made) for loaded in pair.loaded(p, "k"))
    assert e._direct.arena_needed


@pytest.mark.slow
def test_a_feature_that_the_slab_cannot_take_goes_through_the_arena(pair: Pair, arena: Arena) -> None:
    e, p = pair.producer(feature_slab_bytes=SLAB // 4), pair.consumer()
    assert reached(e)
    made = saved(e, "big", rows=1024)  # 32 KiB
    assert isinstance(arrived(p, "big"), Lease)
    assert all(torch.equal(loaded, made) for loaded in pair.loaded(p, "big"))
    assert e._direct.counters()["device.put_failed"] == 1


@pytest.mark.slow
def test_what_is_encoded_again_replaces_what_is_there(pair: Pair) -> None:
    e, p = pair.producer(), pair.consumer(feature_prefetch="demand")
    assert reached(e)
    saved(e, "k")
    wait_for(lambda: e._direct.counters().get("device.put") == 1)
    e.step(needed("k", again=True), {})  # vLLM has let go of it, so it is encoded once more
    made = saved(e, "k")
    wait_for(lambda: e._direct.counters().get("device.put") == 2)
    arrived(p, "k")
    assert all(torch.equal(loaded, made) for loaded in pair.loaded(p, "k"))


def test_consumers_that_start_later_find_the_encoder_and_its_features(pair: Pair) -> None:
    e = pair.producer()
    wait_for(lambda: e._direct.path == "device")
    made = saved(e, "k")
    wait_for(lambda: e._direct.counters().get("device.put"))
    p = pair.consumer()
    assert reached(e)
    arrived(p, "k")
    assert all(torch.equal(loaded, made) for loaded in pair.loaded(p, "k"))


@pytest.mark.slow
def test_a_second_tier_that_comes_late_opens_the_path_when_it_comes(stages: Stages) -> None:
    rpc_port, metrics_port = free_ports(2)
    settings = MasterSettings(rpc_port=rpc_port, metrics_port=metrics_port)
    late = Pair(stages, rpc_address(settings))
    e, ear = late.producer(), stages.ear()
    made = saved(e, "k")
    wait_for(lambda: stages.arena.contains("k"))
    wait_for(lambda: ear.of(wire.StoreReport, feature_path="host"))
    with running_master(settings):
        wait_for(lambda: ear.of(wire.StoreReport, feature_path="device"))
        p = late.consumer()
        assert reached(e)
        arrived(p, "k")
        assert all(torch.equal(loaded, made) for loaded in late.loaded(p, "k"))
        late.close()
