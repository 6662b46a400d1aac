"""Fake devices that get to their work when they are let, and the KV that a model writes there. For the tests here.

KV caches lie as on Ascend: K and V of each layer apart, each a slice of a storage, aligned where the storage is not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from npu_ops.blocks import BlockRun, Blocks
from tests.fake_npu.device import FakeDevice
from tests.waiting import PATIENCE_S

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES = 4, 16, 4, 2, 64
BLOCK_BYTES = BLOCK_SIZE * HEADS * HEAD_BYTES
STALE = 0xA5  # what a fake device's memory holds before it is written
OFTEN_S = 2e-4
STUCK_S = PATIENCE_S / 2  # whoever holds something for somebody who is not coming says so before the test gives up

Caches = Mapping[str, Sequence[torch.Tensor]]


class Turnstile:
    """Holds a stream at each `hold` that was queued in it, until it is let through. Open until `close`."""

    def __init__(self) -> None:
        self._closed = False
        self._came = 0
        self._let = 0
        self._passes = threading.Semaphore(0)

    @property
    def holds(self) -> bool:
        return self._came > self._let

    def close(self) -> None:
        self._closed = True

    def hold(self) -> None:
        """What the stream executes."""
        if self._closed:
            self._came += 1
            assert self._passes.acquire(timeout=STUCK_S)

    def let_one(self) -> None:
        self._let += 1
        self._passes.release()

    def open(self) -> None:
        """From now on nothing is held."""
        self._closed = False
        while self.holds:
            self.let_one()


class SlowDevice(FakeDevice):
    """Computations wait at the turnstile, and where `copies_late` uploads, copies and scatters do."""

    copies_late = False

    def __init__(self, place: str, *, registers: bool = True) -> None:
        super().__init__(place, registers=registers)
        self.turnstile = Turnstile()

    def compute(self, operation: Callable[[], object]) -> None:
        self.run(self.turnstile.hold)
        self.run(operation)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._hold_copy()
        super().upload(target, source)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._hold_copy()
        super().copy(target, source)

    def scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        self._hold_copy()
        super().scatter(rows, runs, source)

    def _hold_copy(self) -> None:
        if self.copies_late:
            self.run(self.turnstile.hold)

    @property
    def stuck(self) -> bool:
        """A thread waits for what is held here."""
        return self.turnstile.holds and self.waited_for()


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request's blocks at P and at D, and the KV that they shall have: [layer, K or V, block, byte]."""

    name: str
    src: tuple[int, ...]
    dst: tuple[int, ...]
    kv: torch.Tensor

    @classmethod
    def make(cls, name: str, src: Iterable[int], dst: Iterable[int]) -> Prompt:
        source = tuple(src)
        chance = torch.Generator().manual_seed(sum(name.encode()))
        sizes = (LAYERS, 2, len(source), BLOCK_BYTES)
        return cls(name, source, tuple(dst), torch.randint(0, STALE, sizes, dtype=torch.uint8, generator=chance))

    def chunk(self, first: int = 0, last: int | None = None) -> Chunk:
        return Chunk(self, first, len(self.src) if last is None else last)

    def differences(self, cache: torch.Tensor) -> list[str]:
        """Where its blocks at D hold others' bytes, or none yet."""
        found = []
        for layer, region in itertools.product(range(LAYERS), range(2)):
            seen, right = cache[layer, region, list(self.dst)], self.kv[layer, region]
            stale = seen.eq(STALE).all(dim=-1)
            if stale.any():
                found.append(f"{self.name} lacks bytes of layer {layer}, {'KV'[region]}")
            if not torch.equal(seen[~stale], right[~stale]):
                found.append(f"{self.name} has others' bytes in layer {layer}, {'KV'[region]}")
        return found


@dataclass(frozen=True)
class Chunk:
    """Blocks [first, last) of a prompt: what one step computes of it."""

    prompt: Prompt
    first: int
    last: int

    def write(self, caches: Caches, layer: int) -> None:
        """What the model does in this layer."""
        for region, cache in enumerate(list(caches.values())[layer]):
            for index in range(self.first, self.last):
                cache[self.prompt.src[index]].view(-1).copy_(self.prompt.kv[layer, region, index])


def ascend_caches(device: FakeDevice, layers: int = LAYERS) -> Caches:
    """Per layer K and V of [blocks, block_size, heads, head_dim], as vllm-ascend allocates them."""
    shape = (BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES)
    size = BLOCKS * BLOCK_BYTES
    return {
        f"model.layers.{i}.attn": [device.allocate(size).data.view(shape), device.allocate(size).data.view(shape)]
        for i in range(layers)
    }


def neighbouring_caches(device: FakeDevice) -> Caches:
    """V behind K in one storage: neighbours here need not be neighbours at the other end."""
    shape = (2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES)
    return {f"layer.{i}": list(device.allocate(2 * BLOCKS * BLOCK_BYTES).data.view(shape)) for i in range(LAYERS)}
