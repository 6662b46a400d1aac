"""One P of several ranks on fake devices, which are late: what the tests of its slab share.

A model step reads what vLLM's encoder cache holds when the device gets to it, not when it is queued. So bytes that are
read before a fence are poison or another feature's, and tests fail where a fence is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from epd_serve.engine.capture_gate import CaptureGate
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.slab_copier import SlabCopier
from epd_serve.engine.ec.step import FeatureStep
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.roles import Role
from npu_ops.memory import DeviceBlock
from store.arena import Arena
from tests.epd_serve.engine.ec.stages import Stages, feature
from tests.epd_serve.engine.ec.vllm_stub import request
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for

ROWS = 64
NBYTES = ROWS * 16 * 2
LATE_S = 0.02


Endpoint = Callable[[FakeDevice, DeviceBlock], MooncakeEndpoint]
"""How a rank's slab is registered with the Transfer Engine of its process."""


class Rank:
    """A worker: its device, what vLLM's encoder cache holds there, and what its steps have read."""

    def __init__(
        self, address: str, rank: int, arena: Arena, gate: CaptureGate, slab: int, endpoint: Endpoint | None = None
    ) -> None:
        self.device = FakeDevice(f"host0/npu{rank}")
        self.device.enter_thread()
        self.arena = Arena.attach(arena.path)
        made = None if endpoint is None else lambda block: endpoint(self.device, block)
        self.copier = SlabCopier(address, rank, self.device, self.arena, gate, made)
        self.cache: dict[str, torch.Tensor] = {}
        self.copied: list[str] = []
        self.read: list[tuple[str, torch.Tensor]] = []
        self.taken = self.copier.open(slab) if slab else 0

    def step(self, step: FeatureStep, freed: tuple[str, ...], keys: tuple[str, ...]) -> None:
        """What a worker does of a step, in vLLM's order."""
        if step.freed_in:
            self.copier.begin_step(step.freed_in)
        for key in freed:
            self.cache.pop(key, None)
        for load in step.loads:
            if load.key not in self.cache:
                if not load.is_in_slab:
                    self.copied.append(load.key)
                self.cache[load.key] = load.read(self.arena, self.device, self.copier.view)
        for key in keys:
            seen = self.cache[key]
            self.device.run(lambda key=key, seen=seen: self.read.append((key, seen.clone())))

    def close(self) -> None:
        self.copier.close()
        self.arena.close()


class World:
    """One P of two ranks. Its model's thread is the test's."""

    def __init__(
        self,
        stages: Stages,
        folder: Path,
        slab: int,
        ranks: int = 2,
        *,
        endpoint: Endpoint | None = None,
        hears: bool = False,
        **more: Any,
    ) -> None:
        address = f"ipc://{folder}/slab"
        self.arena, self.gate = stages.arena, CaptureGate()
        self.p: FeatureConsumer = stages.consumer(hears=hears, role=Role.P, slab=address, ranks=ranks, **more)
        self.ranks = [Rank(address, rank, self.arena, self.gate, slab, endpoint) for rank in range(ranks)]
        self.right: dict[str, torch.Tensor] = {}

    def opened(self) -> World:
        wait_for(lambda: self.slab._places is not None)
        return self

    @property
    def slab(self) -> Any:
        return self.p._slab

    def put(self, *keys: str, rows: int = ROWS) -> None:
        for key in keys:
            self.right[key] = feature(rows)
            data = self.right[key].view(torch.uint8).numpy().reshape(-1)
            self.arena.put(key, data, shape=tuple(self.right[key].shape), dtype="bfloat16")

    def may_run(self, name: str, *keys: str) -> bool:
        return self.p.may_run(request(name, *keys), 0)

    def let_through(self, name: str, *keys: str) -> None:
        wait_for(lambda: self.may_run(name, *keys), f"{name} to be let through")

    def run(self, name: str, *keys: str, freed: tuple[str, ...] = (), finished: tuple[str, ...] = ()) -> FeatureStep:
        """A step that reads these items, for the first time."""
        asked = request(name, *keys)
        for key in keys:
            assert self.p.has(key)
            self.p.allocated(asked, key)
        step = self.p.step(finished, freed)
        for rank in self.ranks:
            rank.step(step, freed, keys)
        return step

    def serve(self, name: str, *keys: str, freed: tuple[str, ...] = ()) -> FeatureStep:
        self.let_through(name, *keys)
        return self.run(name, *keys, freed=freed)

    def done(self) -> None:
        """Every device has done all that its model queued; all that was read is right, and no rule was broken."""
        for rank in self.ranks:
            rank.device.fence()()
            for key, seen in rank.read:
                assert torch.equal(seen, self.right[key]), f"{key} was read too early, or when it was overwritten"
            assert not rank.device.broken

    def late(self, latency_s: float = LATE_S) -> None:
        for rank in self.ranks:
            rank.device.latency_s = latency_s


def counted(world: World, name: str) -> int:
    return world.p.features.counters[name]
