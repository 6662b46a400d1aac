"""What the KV tests share: small KV caches, a P worker and a D worker on real sockets, and vLLM's scheduler objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import zmq

from epd_serve import wire
from epd_serve.engine.kv.link import Link
from epd_serve.engine.kv.link_jobs import Outgoing, PacketJob
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.receiver import Expected, Receiver
from epd_serve.engine.kv.regions import Layers, layers_of, shape_of
from epd_serve.engine.kv.sender import ChunkJob, Sender
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.shm_send import ShmSendSide
from epd_serve.engine.kv.transport import ReceiveSide, SendSide
from epd_serve.kv.faults import Faults
from epd_serve.kv.grouping import FixedGrouping, Grouping
from epd_serve.kv.plan import LayerPacket, Run
from epd_serve.kv.slices import LARGEST_PROBE_BYTES, SLICE_BYTES
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from tests.waiting import PATIENCE_S, wait_for

NO_TRACE = Trace("", "test")
HOST = HostMemory()
BLOCK_SIZE = 4
SCRATCH = HOST.allocate(LARGEST_PROBE_BYTES)
Ends = Callable[..., Any]  # the fixture `start`: makes a DecodeEnd or a PrefillEnd in the test's folder


def caches(layers: int, blocks: int, *, filled: bool, block_bytes: int = 64) -> dict[str, torch.Tensor]:
    """KV caches of [blocks, block_bytes]; filled: every block differs; else zeros."""
    generator = torch.Generator().manual_seed(7)
    return {
        f"layer.{i}": torch.randint(1, 255, (blocks, block_bytes), dtype=torch.uint8, generator=generator)
        if filled
        else torch.zeros((blocks, block_bytes), dtype=torch.uint8)
        for i in range(layers)
    }


def shape(layers: Layers, **changes: Any) -> dict[str, Any]:
    names = [f"layer.{index}" for index in range(len(layers))]
    agreed = {"names": names, "block_size": BLOCK_SIZE, "dtype": "torch.uint8", "tp": 1, "rank": 0, "platform": "test"}
    return shape_of(layers, **{**agreed, **changes})


class DecodeEnd:
    """A D worker: a Receiver into zeroed KV caches. `receiver_options` go to it."""

    def __init__(
        self,
        folder: Path,
        name: str = "D0",
        *,
        layers: int = 5,
        blocks: int = 32,
        life: str = "1",
        kv: dict[str, torch.Tensor] | None = None,
        sides: Iterable[ReceiveSide] | None = None,
        endpoint: str = "",
        receiver_options: dict[str, Any] | None = None,
        **shape_changes: Any,
    ) -> None:
        self.endpoint = endpoint or f"ipc://{folder}/{name}.kvw{shape_changes.get('rank', 0)}"
        self.target = f"{name}:{life}"
        self.caches = caches(layers, blocks, filled=False) if kv is None else kv
        self.layers = layers_of(self.caches, blocks)
        self.side = ShmReceiveSide(self.layers, HOST, PacketMemory(HOST, SLICE_BYTES))
        self.receiver = Receiver(
            self.endpoint,
            self.target,
            shape(self.layers, **shape_changes),
            [self.side] if sides is None else list(sides),
            NO_TRACE,
            device=HOST,
            faults=Faults(),
            **(receiver_options or {}),
        )
        self.received: list[Expected] = []
        self.failed: list[Expected] = []

    def expect(self, key: TransferKey, blocks: Iterable[int]) -> None:
        self.receiver.expect([Expected(key, f"at-d-{key.child}", tuple(blocks))], [])

    def announce(self, key: TransferKey) -> None:
        """D's scheduler has reserved blocks for it; the step that says so has yet to come."""
        with zmq.Context.instance().socket(zmq.DEALER) as scheduler:
            scheduler.connect(self.endpoint)
            scheduler.send(wire.encode(wire.Expect(key)))
            assert wire.to_decode_control.decode(scheduler.recv()) == wire.Expecting(key)

    def fail(self, key: TransferKey) -> None:
        self.receiver.expect([], [key])

    def poll(self) -> bool:
        received, failed = self.receiver.take_finished()
        self.received += received
        self.failed += failed
        return bool(received or failed)

    def wait_ended(self, count: int, deadline_s: float = PATIENCE_S) -> None:
        def ended() -> bool:
            self.poll()
            return len(self.received) + len(self.failed) >= count

        wait_for(ended, f"{count} transfers", deadline_s)

    def close(self) -> None:
        self.receiver.close()


class PrefillEnd:
    """A P worker: a Sender over random KV caches, links with shared-memory staging.

    `link_options` go to each Link; `sides` makes its transports from the layers and the path of its staging memory.
    """

    def __init__(
        self,
        folder: Path,
        *,
        layers: int = 5,
        blocks: int = 32,
        grouping: Grouping | int = 2,
        staging_bytes: int = 1 << 20,
        timeout_s: float = PATIENCE_S,
        kv: dict[str, torch.Tensor] | None = None,
        device: DeviceMemory = HOST,
        sides: Callable[[Layers, str], list[SendSide]] | None = None,
        trace: Trace = NO_TRACE,
        link_options: dict[str, Any] | None = None,
        **shape_changes: Any,
    ) -> None:
        self.folder, self.timeout_s, self.staging_bytes = folder, timeout_s, staging_bytes
        self.caches = caches(layers, blocks, filled=True) if kv is None else kv
        self.layers = layers_of(self.caches, blocks)
        self.shape = shape(self.layers, **shape_changes)
        self.over: set[str] = set()
        self.links: dict[str, Link] = {}
        self.device = device
        self._sides = sides or self._shm
        self._memory = PacketMemory(HOST, SLICE_BYTES)
        self._link_options = link_options or {}
        self.trace = trace
        self.sender = Sender(
            shape=self.shape,
            grouping=FixedGrouping(grouping, "fixed") if isinstance(grouping, int) else grouping,
            device=device,
            open_link=self._open,
            trace=trace,
        )

    def _shm(self, layers: Layers, path: str) -> list[SendSide]:
        return [ShmSendSide(layers, path, self.staging_bytes, self.device, self._memory)]

    def _open(self, endpoint: str, rank: int, on_over: Callable[[Outgoing], None]) -> Link:
        path = self.folder / f"staging-{self.shape['rank']}-{len(self.links)}"
        self.links[endpoint] = Link(
            endpoint,
            rank=rank,
            source="P0:1",
            shape=self.shape,
            sides=self._sides(self.layers, str(path)),
            device=self.device,
            timeout_s=self.timeout_s,
            on_over=on_over,
            trace=self.trace,
            **self._link_options,
        )
        return self.links[endpoint]

    def step(
        self,
        chunks: Iterable[ChunkJob] = (),
        *,
        stops: Iterable[str] = (),
        preempted: Iterable[str] = (),
        hooks: int | None = None,
        names: Iterable[str] | None = None,
        finished: Iterable[str] = (),
        tokens: int = 16,
    ) -> None:
        """One engine step; `hooks`: how many layers announce themselves (default all), or `names`: which, in order."""
        self.sender.begin_step(chunks, stops, preempted, tokens)
        for name in self.shape["layer_names"][:hooks] if names is None else names:
            self.sender.layer_saved(name)
        self.sender.flush()
        self.over |= self.sender.take_over(finished)

    def use(self, device: Any) -> None:
        """From the next step on the layers are written on this device."""
        self.sender._device = self.sender._clock._device = device

    def wait_over(self, requests: set[str], deadline_s: float = PATIENCE_S) -> None:
        def both() -> bool:
            self.over |= self.sender.take_over(())
            return requests <= self.over

        wait_for(both, "the requests to be over", deadline_s)

    def wait_up(self, end: DecodeEnd) -> Link:
        """Opens the link to a D worker, and returns it when it is up."""
        self.sender.meet([[end.endpoint]])
        link = self.links[end.endpoint]
        wait_for(lambda: link.snapshot().state == "up")
        return link

    def close(self) -> None:
        self.sender.close()


def same(p: PrefillEnd, d: DecodeEnd, pairs: dict[int, int]) -> None:
    """D's blocks equal P's for the pairs (source: destination) and are untouched elsewhere."""
    for mine, theirs in zip(p.caches.values(), d.caches.values(), strict=True):
        wanted = torch.zeros_like(theirs)
        for src, dst in pairs.items():
            wanted[dst] = mine[src]
        assert torch.equal(wanted, theirs)


class Gate:
    """A device write that has not happened: what waits for it waits until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    def wait_reached(self) -> None:
        """The test's side: until somebody waits here."""
        assert self.reached.wait(PATIENCE_S)


def packet(
    end: DecodeEnd, name: str, layers: tuple[int, int], runs: Iterable[Run], written: Any = None, target: str = ""
) -> PacketJob:
    """A packet of one transfer, of P's caches of 64 bytes per block."""
    out = Outgoing(key_of(name), name, target or end.target)
    part = LayerPacket(*layers, ((out.key, tuple(runs)),))
    return PacketJob(part, (out,), (0,), (64,) * len(end.layers), written or (lambda: None))


def key_of(name: str) -> TransferKey:
    return TransferKey("t-" + name, name)


def chunk(
    end: DecodeEnd, name: str, src: Iterable[int], dst: Iterable[int], *, last: bool, target: str | None = None
) -> ChunkJob:
    remaining = 0 if last else 16
    return ChunkJob(key_of(name), name, target or end.target, (end.endpoint,), tuple(src), tuple(dst), remaining)


# --- vLLM's objects, as far as our schedulers read them -------------------------------------------------------------


def request(
    name: str, prompt: int, params: dict[str, Any] | None, *, suffix: str = "00000000", token: int = 1, items: Any = ()
) -> Any:
    """A vLLM Request with `prompt` tokens; vLLM puts a random suffix on its id, per instance."""
    return SimpleNamespace(
        request_id=f"chatcmpl-{name}-{suffix}",
        num_prompt_tokens=prompt,
        prompt_token_ids=[token] * prompt,
        mm_features=[SimpleNamespace(identifier=item) for item in items],
        kv_transfer_params=params,
        output_token_ids=[],
        stop_reason=None,
        status=SimpleNamespace(name="RUNNING"),
    )


def scheduled(
    new: Iterable[tuple[str, list[int], int, int]] = (),
    cached: Iterable[tuple[str, list[int] | None, int, int]] = (),
    *,
    resumed: Iterable[str] = (),
    preempted: Iterable[str] | None = None,
    finished: Iterable[str] = (),
) -> Any:
    """A SchedulerOutput. Rows: (request id, new block ids, tokens computed before, tokens scheduled)."""
    new, cached = list(new), list(cached)
    tokens = {row[0]: row[3] for row in (*new, *cached)}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in cached],
            resumed_req_ids=set(resumed),
            new_block_ids=[None if row[1] is None else (row[1],) for row in cached],
            num_computed_tokens=[row[2] for row in cached],
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=None if preempted is None else set(preempted),
        finished_req_ids=set(finished),
    )


def ready(
    key: TransferKey, *, incarnation: str = "p1", blocks: int = 3, prompt: int = 10, **changes: Any
) -> wire.Ready:
    fields: dict[str, Any] = {
        "key": key,
        "incarnation": incarnation,
        "source": "D0:1",
        "blocks": list(range(blocks)),
        "start_token": 0,
        "prompt_tokens": prompt,
        "prompt_hash": "h",
        "endpoints": ["ipc:///nowhere"],
    }
    return wire.Ready(**{**fields, **changes})
