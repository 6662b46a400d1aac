"""Features that go from a device into the arena and from there to another, under an NPU's rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from epd_serve.engine.ec.step import FeatureLoad
from store.arena import Arena
from store.feature_pool import FeaturePool
from tests.epd_serve.engine.ec.stages import Speechless, feature, make_arena
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = make_arena()
    yield made
    made.close()
    made.path.unlink(missing_ok=True)


@pytest.fixture
def device() -> FakeDevice:
    made = FakeDevice(latency_s=0.001)
    made.enter_thread()
    return made


def test_a_feature_is_stored_only_when_the_device_has_written_it(arena: Arena, device: FakeDevice) -> None:
    told: list[str] = []
    right, gate = feature(), threading.Event()
    writer = Speechless(
        FeaturePool(Arena.attach(arena.path)),
        lambda key, event, nbytes=0, *, pooled=False, reason="": told.append(event + reason),
        memory=device,
    )
    made = device.allocate(right.nbytes).data.view(torch.bfloat16).view(right.shape)
    device.run(gate.wait)
    device.run(lambda: made.copy_(right))
    writer.put("k", made)
    wait_for(device.waited_for)
    assert not told and not arena.contains("k")
    gate.set()
    wait_for(lambda: told)
    writer.close()
    assert told == ["put"]
    with arena.lease("k") as lease:  # type: ignore[union-attr]
        assert bytes(arena.view(lease.offset, lease.nbytes)) == right.view(torch.uint8).numpy().tobytes()
    assert not device.broken


def test_a_feature_of_the_arena_is_on_the_device_for_the_next_step(arena: Arena, device: FakeDevice) -> None:
    right = feature()
    arena.put("k", right.view(torch.uint8).numpy().reshape(-1), shape=tuple(right.shape), dtype="bfloat16")
    with arena.lease("k") as lease:  # type: ignore[union-attr]
        read = FeatureLoad.of(lease.meta.key, [lease], [None]).read(arena, device)
    arena.remove("k")  # the reader has taken the bytes: nothing is read from the arena any more
    seen: list[torch.Tensor] = []
    device.run(lambda: seen.append(read.clone()))
    device.fence()()
    assert torch.equal(seen[0], right) and device.owns(read.data_ptr(), right.nbytes)
    assert not device.broken
