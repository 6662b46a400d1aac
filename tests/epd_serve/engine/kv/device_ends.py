"""A P worker and a D worker on fake devices, whole but for vLLM: the model writes late, D copies late. For the tests.

A model step queues, layer by layer, the write of that layer's KV and then calls the hook. `Turnstile`s hold both
devices' streams before each write; `Pair.run` lets one through only when somebody waits for it. So every run takes the
same course, and whoever does not wait for a fence always meets bytes that are not there yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from epd_serve import wire
from epd_serve.engine.kv.link import Link
from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_send import MooncakeSendSide
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.receiver import Expected, Receiver
from epd_serve.engine.kv.regions import Layers, flat_regions, layers_of, shape_of
from epd_serve.engine.kv.sender import ChunkJob, Sender
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.shm_send import ShmSendSide
from epd_serve.engine.kv.transport import AwaitMessage, SendSide
from epd_serve.engine.kv.transports import OnDemand
from epd_serve.kv.faults import Faults
from epd_serve.kv.grouping import parse_grouping
from epd_serve.kv.slices import LARGEST_PROBE_BYTES, SLICE_BYTES
from epd_serve.trace import Trace
from tests.epd_serve.engine.kv.fakes import NO_TRACE, key_of
from tests.epd_serve.engine.kv.slow_devices import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    BLOCKS,
    LAYERS,
    OFTEN_S,
    STALE,
    STUCK_S,
    Caches,
    Chunk,
    Prompt,
    SlowDevice,
    ascend_caches,
)
from tests.fake_npu.device import FakeDevice
from tests.fake_npu.engine import FakeTransferEngine
from tests.fake_npu.network import FakeNetwork
from tests.waiting import wait_for

P_NPU, D_NPU = "host0/npu0", "host0/npu1"
TARGET = "D0:1"


def shape(layers: Layers) -> dict[str, Any]:
    names = [f"layer.{index}" for index in range(len(layers))]
    return shape_of(layers, names=names, block_size=BLOCK_SIZE, dtype="torch.uint8", tp=1, rank=0, platform="fake")


class WatchedShm(ShmSendSide):
    """`waits`: it has no room before D returns a credit."""

    waits = False

    def make_room(self, nbytes: int, receive: AwaitMessage) -> None:
        self.waits = not self._ring.fits(nbytes)
        super().make_room(nbytes, receive)
        self.waits = False


@dataclass
class Setting:
    """What tests vary. `transports`: in P's order of preference. `grouping`: as `--kv-grouping` has it."""

    transports: tuple[str, ...] = ("shm",)
    protocol: str = "ascend"  # Mooncake's
    timeout_s: float = STUCK_S  # of a silent peer; long, because a machine that pauses is none
    grouping: str = "fixed:2"
    staging_bytes: int = 256 << 10
    p_device: Callable[[str], SlowDevice] = SlowDevice
    d_device: Callable[[str], SlowDevice] = SlowDevice
    p_caches: Callable[[FakeDevice], Caches] = ascend_caches
    d_caches: Callable[[FakeDevice], Caches] = ascend_caches
    d_place: str = D_NPU
    network: FakeNetwork = field(default_factory=FakeNetwork)
    trace: Trace = NO_TRACE


class Pair:
    """Both workers. The calling thread is that of P's model; D's takes reports in a thread of its own."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self._folder, self._setting = folder, setting
        self.network = setting.network
        self.reports: dict[str, torch.Tensor | None] = {}  # D's KV cache at the report; None: failed
        self._over: set[str] = set()
        self._asked: set[str] = set()
        self.p_device, self.d_device = setting.p_device(P_NPU), setting.d_device(setting.d_place)
        self.d_device.copies_late = True
        self.p_device.enter_thread()
        self.d_device.enter_thread()
        self.p_caches, self.d_caches = setting.p_caches(self.p_device), setting.d_caches(self.d_device)
        self.endpoint = f"ipc://{folder}/D0.kvw0"
        self.receiver = self._receiver()
        self.sender = self._sender()
        self._closing = threading.Event()
        self._d_model = threading.Thread(target=self._take_reports)
        self._d_model.start()

    # --- start and end --------------------------------------------------------------------------------------------

    def open(self) -> wire.KvLink:
        """The link, once it is up or has said why not; silence of D is no reason, it is asked again.

        From then on the devices hold what they are given.
        """
        self.sender.meet([(self.endpoint,)])
        wait_for(lambda: self.link().state == "up" or "silent" not in (self.link().reason or "silent"))
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
        self._closing.set()
        self._d_model.join(STUCK_S)
        self.receiver.close()

    # --- the model's steps ----------------------------------------------------------------------------------------

    def expect(self, *prompts: Prompt) -> None:
        self._asked.update(prompt.name for prompt in prompts)
        items = [Expected(key_of(prompt.name), prompt.name, prompt.dst) for prompt in prompts]
        self.receiver.expect(items, [])

    def step(self, *chunks: Chunk, preempted: Iterable[str] = (), hooks: int = LAYERS) -> None:
        """Queues one step of P's model; returns as soon as all is queued. `hooks`: layers that announce themselves."""
        jobs = [self._job(chunk) for chunk in chunks]
        self.sender.begin_step(jobs, (), preempted, tokens=sum(c.last - c.first for c in chunks) * BLOCK_SIZE)
        for layer in range(LAYERS):
            self.p_device.compute(lambda layer=layer: [chunk.write(self.p_caches, layer) for chunk in chunks])
            if layer < hooks:
                self.sender.layer_saved(f"layer.{layer}")
        self.sender.flush()

    def hang_in(self, prompt: Prompt, blocks: int | None = None) -> None:
        """Computes it (or `blocks` of it) and leaves the link with a write under way until `network.gate` is set."""
        self.p_device.turnstile.open()
        self.network.gate.clear()
        self.step(prompt.chunk(0, blocks))
        wait_for(self.is_writing)

    def take_up(self) -> None:
        """Until the link asks for the end of the write that hangs, or D has reported all without it."""
        queries = self._engine_of_p().status_queries
        wait_for(lambda: self._engine_of_p().status_queries > queries or self._asked <= self.reports.keys())

    def is_writing(self) -> bool:
        return self._engine_of_p().pending > 0

    def _engine_of_p(self) -> FakeTransferEngine:
        engine = self.p_device.engine
        assert isinstance(engine, FakeTransferEngine)
        return engine

    def run(self, *, hold_d_until: Callable[[], bool] = lambda: True) -> None:
        """Lets held work go, one by one, each only when somebody waits for it, until all is reported."""
        while not self._ended():
            wait_for(lambda: self._ended() or self._let_go(hold_d_until))
        self.p_device.turnstile.open()
        self.d_device.turnstile.open()

    def over_at_p(self) -> bool:
        """Whether P has reported all that were expected as over."""
        self._over |= self.sender.take_over(self._asked)
        return self._asked <= self._over

    def waits_for_room(self) -> bool:
        """Whether P can stage nothing more before D has copied."""
        return any(isinstance(side, WatchedShm) and side.waits for side in self.p_sides)

    def _ended(self) -> bool:
        """Whether D has reported all; once the link has broken D may never hear of the rest, and P's word does."""
        over = self.over_at_p()
        return self._asked <= self.reports.keys() or (over and self._broke())

    def _broke(self) -> bool:
        link = self.link()
        return bool((link.state != "up" and link.reason) or link.retries)

    def _job(self, chunk: Chunk) -> ChunkJob:
        prompt, part = chunk.prompt, slice(chunk.first, chunk.last)
        remaining = (len(prompt.src) - chunk.last) * BLOCK_SIZE
        key, ends = key_of(prompt.name), (self.endpoint,)
        return ChunkJob(key, prompt.name, TARGET, ends, prompt.src[part], prompt.dst[part], remaining)

    def _take_reports(self) -> None:
        """D's model: reads the blocks of what is reported, as the next step would. It may wait for D's listener."""
        self.d_device.enter_thread()
        while not self._closing.wait(OFTEN_S):
            received, failed = self.receiver.take_finished()
            for item in received:
                self.reports[item.request] = self.at_d()
            self.reports.update({item.request: None for item in failed})

    def _let_go(self, hold_d_until: Callable[[], bool]) -> bool:
        """P goes on only when D has reported all that P has ended: what came after DONE must not make up for it."""
        p_stuck = self.p_device.stuck
        self.over_at_p()  # asked afterwards: all that its link ended before it got stuck
        reported = self._broke() or self._over <= self.reports.keys()
        if p_stuck and reported:
            self.p_device.turnstile.let_one()
            return True
        if self.d_device.stuck and (not reported or hold_d_until()):
            self.d_device.turnstile.let_one()
            return True
        return False

    # --- what came of it ------------------------------------------------------------------------------------------

    def at_d(self) -> torch.Tensor:
        """D's KV cache as its model would read it now: [layer, K or V, block, byte]."""
        regions = [cache for layer in self.d_caches.values() for cache in layer]
        host = [self.d_device.to_host(cache).view(BLOCKS, BLOCK_BYTES) for cache in regions]
        return torch.stack(host).view(len(self.d_caches), -1, BLOCKS, BLOCK_BYTES)

    def wrong(self, *prompts: Prompt, maybe: Sequence[Prompt] = ()) -> list[str]:
        """All that is not as it should be. `maybe`: may have been received, whole, or have failed on its way."""
        found = list(self.p_device.broken + self.d_device.broken)
        now = self.at_d()
        for prompt in (*prompts, *maybe):
            seen = self.reports.get(prompt.name)
            if seen is not None:
                found += prompt.differences(seen)
            elif prompt not in maybe:
                found.append(f"{prompt.name} was not received ({self.link().reason})")
        theirs = {block for prompt in (*prompts, *maybe) for block in prompt.dst}
        if not now[:, :, [block for block in range(BLOCKS) if block not in theirs]].eq(STALE).all():
            found.append("blocks of nobody were written")
        return found

    # --- parts ----------------------------------------------------------------------------------------------------

    def _receiver(self) -> Receiver:
        layers = layers_of(self.d_caches, BLOCKS)
        sides = [
            ShmReceiveSide(layers, self.d_device, PacketMemory(self.d_device, SLICE_BYTES))
            if name == "shm"
            else MooncakeReceiveSide(self._engine(layers, self.d_device))
            for name in self._setting.transports
        ]
        return Receiver(self.endpoint, TARGET, shape(layers), sides, NO_TRACE, device=self.d_device, faults=Faults())

    def _sender(self) -> Sender:
        layers = layers_of(self.p_caches, BLOCKS)
        memory = PacketMemory(self.p_device, SLICE_BYTES)
        self.p_sides: list[SendSide] = [
            WatchedShm(layers, str(self._folder / "staging"), self._setting.staging_bytes, self.p_device, memory)
            if name == "shm"
            else MooncakeSendSide(
                layers,
                self._engine(layers, self.p_device),
                self._setting.protocol,
                timeout_s=self._setting.timeout_s,
            )
            for name in self._setting.transports
        ]

        def open_link(endpoint: str, rank: int, on_over: Callable[[Outgoing], None]) -> Link:
            return Link(
                endpoint,
                rank=rank,
                source="P0:1",
                shape=shape(layers),
                sides=self.p_sides,
                device=self.p_device,
                timeout_s=self._setting.timeout_s,
                on_over=on_over,
                trace=NO_TRACE,
            )

        grouping = parse_grouping(self._setting.grouping, floor_bytes=0)
        trace = self._setting.trace
        return Sender(shape=shape(layers), grouping=grouping, device=self.p_device, open_link=open_link, trace=trace)

    def _engine(self, layers: Layers, device: FakeDevice) -> OnDemand:
        def factory() -> FakeTransferEngine:
            return FakeTransferEngine(self.network, device)

        scratch = device.allocate(LARGEST_PROBE_BYTES)
        return OnDemand(
            lambda: MooncakeEndpoint(
                flat_regions(layers), "127.0.0.1", self._setting.protocol, device, scratch, factory
            )
        )
