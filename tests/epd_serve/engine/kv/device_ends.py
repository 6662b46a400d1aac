"""A P worker and a D worker on fake devices, whole but for vLLM: the model writes late, D copies late. For the tests.

KV caches lie as on Ascend: K and V of each layer apart, each a slice of a storage, aligned where the storage is not.
A model step queues, layer by layer, the write of that layer's KV and then calls the hook. `Turnstile`s hold both
devices' streams before each write; `Pair.run` lets one through only when somebody waits for it. So every run takes the
same course, and whoever does not wait for a fence always meets bytes that are not there yet.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from epd_serve import wire
from epd_serve.engine.kv.faults import Faults
from epd_serve.engine.kv.link import Link
from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_send import MooncakeSendSide
from epd_serve.engine.kv.receiver import Expected, Receiver
from epd_serve.engine.kv.regions import Layers, layers_of, shape_of
from epd_serve.engine.kv.sender import ChunkJob, Sender
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.shm_send import ShmSendSide
from epd_serve.kv.grouping import parse_grouping
from npu_ops.fake import FakeDevice
from npu_ops.fake_engine import FakeNetwork, FakeTransferEngine
from tests.epd_serve.engine.kv.fakes import NO_TRACE, key_of

P_NPU, D_NPU = "host0/npu0", "host0/npu1"
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES = 4, 16, 4, 2, 64
BLOCK_BYTES = BLOCK_SIZE * HEADS * HEAD_BYTES
STALE = 0xA5  # what a fake device's memory holds before it is written
TARGET = "D0:1"
_STUCK_S = 10.0

Caches = Mapping[str, Sequence[torch.Tensor]]


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; asks often, as there are many short waits in a run."""
    deadline = time.monotonic() + _STUCK_S
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(2e-4)


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
            assert self._passes.acquire(timeout=_STUCK_S)

    def let_one(self) -> None:
        self._let += 1
        self._passes.release()

    def open(self) -> None:
        """From now on nothing is held."""
        self._closed = False
        while self.holds:
            self.let_one()


class SlowDevice(FakeDevice):
    """Uploads wait at the turnstile, and so do computations."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.turnstile = Turnstile()

    def compute(self, operation: Callable[[], object]) -> None:
        self.run(self.turnstile.hold)
        self.run(operation)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.run(self.turnstile.hold)
        super().upload(target, source)

    @property
    def stuck(self) -> bool:
        """A thread waits for what is held here."""
        return self.turnstile.holds and self.waited_for()


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Chunk:
    """Blocks [first, last) of a prompt: what one step computes of it."""

    prompt: Prompt
    first: int
    last: int

    def job(self, endpoints: Sequence[str]) -> ChunkJob:
        prompt, part = self.prompt, slice(self.first, self.last)
        remaining = (len(prompt.src) - self.last) * BLOCK_SIZE
        return ChunkJob(
            key_of(prompt.name), prompt.name, TARGET, tuple(endpoints), prompt.src[part], prompt.dst[part], remaining
        )

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


def shape(layers: Layers) -> dict[str, Any]:
    return shape_of(layers, block_size=BLOCK_SIZE, dtype="torch.uint8", tp=1, rank=0, platform="fake")


@dataclass
class Setting:
    """What tests vary. `transports`: in P's order of preference. `grouping`: as `--kv-grouping` has it."""

    transports: tuple[str, ...] = ("shm",)
    grouping: str = "fixed:2"
    staging_bytes: int = 256 << 10
    p_device: Callable[[str], SlowDevice] = SlowDevice
    d_device: Callable[[str], SlowDevice] = SlowDevice
    p_caches: Callable[[FakeDevice], Caches] = ascend_caches
    d_caches: Callable[[FakeDevice], Caches] = ascend_caches
    d_place: str = D_NPU
    network: FakeNetwork = field(default_factory=FakeNetwork)


class Pair:
    """Both workers. The calling thread is the model's at both ends. Raises LinkError as the workers do at start."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self._folder, self._setting = folder, setting
        self.network = setting.network
        self.reports: dict[str, torch.Tensor | None] = {}  # D's KV cache at the report; None: failed
        self._over: set[str] = set()
        self._asked: set[str] = set()
        self.p_device, self.d_device = setting.p_device(P_NPU), setting.d_device(setting.d_place)
        self.p_device.enter_thread()
        self.d_device.enter_thread()
        self.p_caches, self.d_caches = setting.p_caches(self.p_device), setting.d_caches(self.d_device)
        self.endpoint = f"ipc://{folder}/D0.kvw0"
        self.receiver = self._receiver()
        try:
            self.sender = self._sender()
        except BaseException:
            self.receiver.close()
            raise

    # --- start and end --------------------------------------------------------------------------------------------

    def open(self) -> wire.KvLink:
        """The link, once it is up or has said why not. From then on the devices hold what they are given."""
        self.sender.warm([(self.endpoint,)])
        wait_for(lambda: self.link().state == "up" or self.link().reason)
        self.p_device.turnstile.close()
        self.d_device.turnstile.close()
        return self.link()

    def link(self) -> wire.KvLink:
        (report,) = self.sender.report()
        return report

    def close(self) -> None:
        for device in (self.p_device, self.d_device):
            device.turnstile.open()
        self.network.gate.set()
        self.sender.close()
        self.receiver.close()

    # --- the model's steps ----------------------------------------------------------------------------------------

    def expect(self, *prompts: Prompt) -> None:
        self._asked.update(prompt.name for prompt in prompts)
        items = [Expected(key_of(prompt.name), prompt.name, prompt.dst) for prompt in prompts]
        self.receiver.expect(items, [])

    def step(self, *chunks: Chunk, preempted: Iterable[str] = (), hooks: int = LAYERS) -> None:
        """Queues one step of P's model; returns as soon as all is queued. `hooks`: layers that announce themselves."""
        jobs = [chunk.job([self.endpoint]) for chunk in chunks]
        self.sender.begin_step(jobs, (), preempted, tokens=sum(c.last - c.first for c in chunks) * BLOCK_SIZE)
        for layer in range(LAYERS):
            self.p_device.compute(lambda layer=layer: [chunk.write(self.p_caches, layer) for chunk in chunks])
            if layer < hooks:
                self.sender.layer_saved()
        self.sender.flush()

    def hang_in(self, prompt: Prompt) -> None:
        """Computes it and leaves the link with a write of it under way, which ends when `network.gate` is set."""
        self.p_device.turnstile.open()
        self.network.gate.clear()
        self.step(prompt.chunk())
        engine = self.p_device.engine
        assert isinstance(engine, FakeTransferEngine)
        wait_for(lambda: engine.pending)

    def run(self, *, hold_d_until: Callable[[], bool] = lambda: True) -> None:
        """Lets held work go, one by one, each only when somebody waits for it, until all is reported."""
        while not self._ended():
            wait_for(lambda: self._ended() or self._let_go(hold_d_until))
        self.p_device.turnstile.open()
        self.d_device.turnstile.open()

    def over_at_p(self) -> bool:
        """Whether P has reported all that were expected as over."""
        self._over |= self.sender.take_over(self._asked, idle=False)
        return self._asked <= self._over

    def _ended(self) -> bool:
        """Whether D has reported all; once the link has broken D may never hear of the rest, and P's word does."""
        received, failed = self.receiver.take_finished(idle=False)
        for item in received:
            self.reports[item.request] = self.at_d()
        self.reports.update({item.request: None for item in failed})
        broke = bool(self.link().reason or self.link().retries)
        return self._asked <= self.reports.keys() or (broke and self.over_at_p())

    def _let_go(self, hold_d_until: Callable[[], bool]) -> bool:
        if self.p_device.stuck:
            self.p_device.turnstile.let_one()
            return True
        if self.d_device.stuck and hold_d_until():
            self.d_device.turnstile.let_one()
            return True
        return False

    # --- what came of it ------------------------------------------------------------------------------------------

    def at_d(self) -> torch.Tensor:
        """D's KV cache as its model would read it now: [layer, K or V, block, byte]."""
        regions = [cache for layer in self.d_caches.values() for cache in layer]
        host = [self.d_device.to_host(cache).view(BLOCKS, BLOCK_BYTES) for cache in regions]
        return torch.stack(host).view(len(self.d_caches), -1, BLOCKS, BLOCK_BYTES)

    def wrong(self, *whole: Prompt, part: Sequence[Prompt] = ()) -> list[str]:
        """All that is not as it should be.

        Args:
            whole: what was to arrive and be reported.
            part: what was to be reported as failed; some of it may have arrived.
        """
        found = list(self.p_device.broken + self.d_device.broken)
        now = self.at_d()
        for prompt in whole:
            seen = self.reports.get(prompt.name)
            if seen is None:
                found.append(f"{prompt.name} was not received ({self.link().reason})")
            else:
                found += _others(prompt, seen, missing_too=True)
        for prompt in part:
            if self.reports.get(prompt.name, now) is not None:
                found.append(f"{prompt.name} was not reported as failed")
            found += _others(prompt, now, missing_too=False)
        theirs = {block for prompt in (*whole, *part) for block in prompt.dst}
        if not now[:, :, [block for block in range(BLOCKS) if block not in theirs]].eq(STALE).all():
            found.append("blocks of nobody were written")
        return found

    # --- parts ----------------------------------------------------------------------------------------------------

    def _receiver(self) -> Receiver:
        layers = layers_of(self.d_caches, BLOCKS)
        sides = [
            ShmReceiveSide(layers, self.d_device)
            if name == "shm"
            else MooncakeReceiveSide(self._engine(layers, self.d_device))
            for name in self._setting.transports
        ]
        return Receiver(self.endpoint, TARGET, shape(layers), sides, NO_TRACE, device=self.d_device, faults=Faults())

    def _sender(self) -> Sender:
        layers = layers_of(self.p_caches, BLOCKS)
        sides = [
            ShmSendSide(layers, str(self._folder / "staging"), self._setting.staging_bytes, self.p_device)
            if name == "shm"
            else MooncakeSendSide(layers, self._engine(layers, self.p_device), "ascend", timeout_s=2.0)
            for name in self._setting.transports
        ]

        def open_link(endpoint: str, rank: int, on_over: Callable[[Outgoing], None]) -> Link:
            return Link(
                endpoint,
                rank=rank,
                source="P0:1",
                shape=shape(layers),
                sides=sides,
                device=self.p_device,
                timeout_s=2.0,
                on_over=on_over,
                trace=NO_TRACE,
            )

        grouping = parse_grouping(self._setting.grouping, floor_bytes=0)
        return Sender(shape=shape(layers), grouping=grouping, device=self.p_device, open_link=open_link, trace=NO_TRACE)

    def _engine(self, layers: Layers, device: FakeDevice) -> MooncakeEndpoint:
        def factory() -> FakeTransferEngine:
            return FakeTransferEngine(self.network, device)

        return MooncakeEndpoint(layers, "127.0.0.1", "ascend", device, factory)


def _others(prompt: Prompt, cache: torch.Tensor, *, missing_too: bool) -> list[str]:
    """Where a prompt's blocks at D hold others' bytes, or none yet."""
    found = []
    for layer, region in itertools.product(range(LAYERS), range(2)):
        seen, right = cache[layer, region, list(prompt.dst)], prompt.kv[layer, region]
        stale = seen.eq(STALE).all(dim=-1)
        if missing_too and stale.any():
            found.append(f"{prompt.name} lacks bytes of layer {layer}, {'KV'[region]}")
        if not torch.equal(seen[~stale], right[~stale]):
            found.append(f"{prompt.name} has others' bytes in layer {layer}, {'KV'[region]}")
    return found
