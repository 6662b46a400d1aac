"""Features that are copied to the devices of two ranks ahead of their steps: vLLM's calls, devices that are late.

They fail where a fence is left out (`slab_world.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate
from epd_serve.engine.ec.slab_copier import SlabCopier
from epd_serve.engine.ec.step import FeatureStep
from store.arena import Arena
from store.keys import part_keys
from tests.epd_serve.engine.ec.slab_world import NBYTES, ROWS, Rank, World, counted
from tests.epd_serve.engine.ec.stages import Stages, is_ready
from tests.epd_serve.engine.ec.vllm_stub import request
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for

Make = Callable[..., World]


@pytest.fixture
def world(stages: Stages, tmp_path: Path) -> Iterator[Make]:
    made: list[World] = []

    def make(features: float = 4, **more: Any) -> World:
        made.append(World(stages, tmp_path, round(features * NBYTES), **more))
        return made[-1]

    yield make
    stages.close()
    for one in made:
        for rank in one.ranks:
            rank.close()


def test_a_step_reads_what_was_copied_ahead_and_copies_nothing(world: Make) -> None:
    w = world().opened()
    w.late()
    w.put("a", "b")
    step = w.serve("r", "a", "b")
    assert all(load.is_in_slab for load in step.loads)
    w.done()
    assert not any(rank.copied for rank in w.ranks) and len(w.ranks[0].read) == 2


def test_no_request_is_let_through_before_the_last_rank_has_its_features(world: Make) -> None:
    w, held = world().opened(), threading.Event()
    slow = w.ranks[1].device
    upload = slow.upload

    def held_up(target: torch.Tensor, source: torch.Tensor) -> None:
        slow.run(held.wait)
        upload(target, source)

    slow.upload = held_up  # type: ignore[method-assign]
    w.put("a")
    assert not w.may_run("r", "a")
    wait_for(slow.waited_for)
    wait_for(lambda: w.slab._copies and next(iter(w.slab._copies.values())).place.copying == {1})
    assert not w.may_run("r", "a") and w.p.waiting()
    assert w.arena.stats().leased == 1, "the copy reads it"
    held.set()
    w.serve("r", "a")
    w.done()


def test_a_copy_waits_for_steps_that_may_still_read_what_lay_there(world: Make) -> None:
    """vLLM frees `a` in a step whose predecessors have not got to reading it."""
    w = world(features=1).opened()
    w.put("a", "b")
    w.serve("r", "a")
    gates = [threading.Event() for _ in w.ranks]
    for rank, gate in zip(w.ranks, gates, strict=True):
        rank.device.run(gate.wait)
        rank.step(FeatureStep(), (), ("a",))  # one more step, of a later chunk
    w.p.release(["r"])
    w.run("", freed=("a",))
    assert not w.may_run("s", "b")
    wait_for(lambda: all(rank.device.waited_for() for rank in w.ranks))
    assert not w.may_run("s", "b")
    for gate in gates:
        gate.set()
    assert w.serve("s", "b").loads[0].slots[0].slab_at == 0
    w.done()
    assert [key for key, _ in w.ranks[0].read] == ["a", "a", "b"]


def test_a_reset_of_vllms_cache_frees_what_it_had_behind_the_steps_that_read_it(world: Make) -> None:
    w = world(features=1).opened()
    w.put("a", "b")
    w.serve("r", "a")
    gates = [threading.Event() for _ in w.ranks]
    for rank, gate in zip(w.ranks, gates, strict=True):
        rank.device.run(gate.wait)
        rank.step(FeatureStep(), (), ("a",))
    w.p.release(["r"])
    w.p.encoder_cache_reset()
    for rank in w.ranks:
        rank.cache.clear()
    assert not w.may_run("s", "b")
    wait_for(lambda: w.slab.is_coming("b", time.monotonic()), "a copy that has the place of a")
    w.run("")  # vLLM names nothing that it frees
    wait_for(lambda: all(rank.device.waited_for() for rank in w.ranks))
    for gate in gates:
        gate.set()
    assert w.serve("s", "b").loads[0].slots[0].slab_at == 0
    w.done()
    assert [key for key, _ in w.ranks[0].read] == ["a", "a", "b"]


def test_what_is_read_again_after_a_reset_keeps_its_place(world: Make) -> None:
    w = world(features=1).opened()
    w.put("a", "b")
    w.serve("r", "a")
    w.p.encoder_cache_reset()
    for rank in w.ranks:
        rank.cache.clear()
    assert w.serve("s", "a").loads[0].slots[0].slab_at == 0
    assert w.serve("t", "b").loads[0].slots[0].slab_at is None, "vLLM has a again"
    w.done()


def test_steps_without_tokens_free_as_well(world: Make) -> None:
    """vLLM skips the connector on these; an engine that has nothing else to run would wait for ever."""
    w = world(features=1).opened()
    w.put("a", "b")
    w.serve("r", "a")
    w.p.release(["r"])
    w.run("", freed=("a",))
    assert w.serve("s", "b").loads[0].slots[0].slab_at == 0
    w.done()


def test_before_every_rank_has_its_slab_features_are_copied_in_the_step(world: Make) -> None:
    w = world(features=0)
    w.put("a")
    assert w.serve("r", "a").loads[0].slots[0].slab_at is None
    w.done()
    assert all(rank.copied == ["a"] for rank in w.ranks)


def test_no_thread_touches_a_device_while_graphs_are_captured(stages: Stages, tmp_path: Path) -> None:
    gate = CaptureGate()
    gate.close()
    p = stages.consumer(hears=False, slab=f"ipc://{tmp_path}/slab")
    rank = Rank(f"ipc://{tmp_path}/slab", 0, stages.arena, gate, NBYTES)
    slab: Any = p._slab
    with rank.device.capturing():
        time.sleep(0.3)  # longer than the thread naps
        assert slab._places is None
    assert not rank.device.broken
    gate.open()
    wait_for(lambda: slab._places is not None)
    assert rank.device.registered, "the arena is page-locked"
    rank.close()
    assert not rank.device.registered and not rank.device.broken


def test_a_corrupt_feature_is_read_by_nobody_although_it_was_copied(world: Make) -> None:
    """It is copied while its checksum is looked at."""
    w = world(features=1).opened()
    w.late()
    w.put("a")
    with w.arena.lease("a") as lease:  # type: ignore[union-attr]
        w.arena.memory()[lease.offset] ^= 1
    assert not w.may_run("r", "a")
    wait_for(lambda: w.arena.stats().corrupt and not w.slab.is_coming("a", 0.0))
    assert not w.p.has("a") and w.slab._places.find("a") is None
    w.p.release(["r"])
    wait_for(lambda: w.arena.stats().leased == 0)
    w.put("a")
    assert w.serve("s", "a").loads[0].slots[0].slab_at == 0
    w.done()


def test_what_does_not_fit_is_copied_in_the_step_and_nobody_waits_for_room(world: Make) -> None:
    w = world(features=2).opened()
    w.put("a", "b", "c")
    step = w.serve("r", "a", "b", "c")
    assert sorted(load.slots[0].slab_at is None for load in step.loads) == [False, False, True]
    w.done()
    assert counted(w, "slab_full")


def test_a_feature_larger_than_the_slab_is_copied_in_the_step(world: Make) -> None:
    w = world(features=1).opened()
    w.put("a", rows=2 * ROWS)
    assert w.serve("r", "a").loads[0].slots[0].slab_at is None
    w.done()


def test_what_requests_wait_for_is_not_dropped_for_others(world: Make) -> None:
    w = world(features=2).opened()
    w.put("a", "b", "c")
    assert not w.may_run("r", "a", "not here")
    wait_for(lambda: is_ready(w.p, "a"))
    assert w.serve("s", "b").loads[0].slots[0].slab_at is not None
    assert w.serve("t", "c").loads[0].slots[0].slab_at is None, "vLLM has b, r waits for a"
    w.put("not here")
    assert w.serve("r", "a", "not here").loads[0].slots[0].slab_at is not None
    w.done()


def test_a_feature_that_had_no_room_is_copied_ahead_when_there_is_some(world: Make) -> None:
    w = world(features=1).opened()
    w.put("a", "b")
    w.serve("r", "a")
    w.p.look_for(["b"])
    wait_for(lambda: is_ready(w.p, "b"))
    w.p.release(["r"])
    w.run("", freed=("a",))
    assert not w.may_run("s", "b"), "not at once: it can be copied before"
    assert w.serve("s", "b").loads[0].slots[0].slab_at is not None
    w.done()


def test_what_vllm_has_freed_may_be_read_again_where_it_lies(world: Make) -> None:
    w = world().opened()
    w.put("a")
    first = w.serve("r", "a")
    w.p.release(["r"])
    w.run("", freed=("a",))
    again = w.serve("s", "a")
    assert first.loads[0].slots[0].slab_at == again.loads[0].slots[0].slab_at and counted(w, "slab_copied") == 1
    w.done()


def test_a_request_that_ends_before_it_was_scheduled_keeps_no_room(world: Make) -> None:
    w = world(features=1).opened()
    w.put("a", "b")
    w.let_through("r", "a")
    w.p.release(["r"])
    assert w.serve("s", "b").loads[0].slots[0].slab_at is not None
    w.done()


def test_two_requests_with_one_image_share_its_place(world: Make) -> None:
    w = world(features=2).opened()
    w.put("a", "b", "c")
    w.let_through("r", "a")
    w.let_through("s", "a")
    w.run("r", "a")
    w.p.release(["r"])
    w.run("", freed=("a",))
    assert w.serve("t", "b", "c").loads[1].slots[0].slab_at is not None, "s would find a in vLLM's cache"
    w.done()


def test_parts_of_an_image_are_joined_on_the_device_and_leave_the_slab(world: Make) -> None:
    w = world(features=2).opened()
    w.late()
    parts = part_keys("k", 2)
    w.put(*parts)
    w.right["k"] = torch.cat([w.right[part] for part in parts])
    asked = request("r", "k", **{wire.PARTS_XARG: ",".join(parts)})
    wait_for(lambda: w.p.may_run(asked, 0), "both parts")
    assert w.p.has("k")
    w.p.allocated(asked, "k")
    step = w.p.step(())
    assert step.loads[0].is_in_slab
    for rank in w.ranks:
        rank.step(step, (), ("k",))
    w.p.release(["r"])
    w.run("")  # vLLM still has the image, which is a tensor of its own
    w.put("a", "b")
    assert all(load.is_in_slab for load in w.serve("s", "a", "b").loads)
    w.done()


def test_a_device_without_room_for_a_slab_serves_without(stages: Stages, tmp_path: Path) -> None:
    from npu_ops.memory import DeviceMemoryError

    device = FakeDevice()

    def refuses(nbytes: int, alignment: int | None = None) -> Any:
        raise DeviceMemoryError("no room")

    device.allocate = refuses  # type: ignore[method-assign]
    arena = Arena.attach(stages.arena.path)
    copier = SlabCopier(f"ipc://{tmp_path}/slab", 0, device, arena)
    assert copier.open(NBYTES) == 0
    copier.close()
    arena.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_requests_reads_right_bytes(world: Make, seed: int) -> None:
    """Steps that run late, features of several sizes, a slab that is too small, vLLM's cache evicting as it likes."""
    import random

    chance, w = random.Random(seed), world(features=3).opened()
    w.late(0.002)
    cached: list[str] = []
    for turn in range(40):
        keys = [f"{turn}-{index}" for index in range(chance.randint(1, 3))]
        for key in keys:
            w.put(key, rows=chance.choice([ROWS // 4, ROWS // 2, ROWS]))
        freed = tuple(key for key in cached if chance.random() < 0.6)
        cached = [key for key in cached if key not in freed] + keys
        w.serve(f"r{turn}", *keys, freed=freed)
        for rank in w.ranks:
            rank.step(FeatureStep(), (), tuple(cached))
        w.p.release([f"r{turn}"])
        for key in keys:
            w.arena.remove(key)
    w.done()
    assert counted(w, "slab_copied") > 20
