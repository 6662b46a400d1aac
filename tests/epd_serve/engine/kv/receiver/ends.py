"""D's worker, and a P worker that is driven by hand: real sockets, real shared memory, no vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.receiver import Expected, Receiver
from epd_serve.engine.kv.regions import layers_of, shape_of
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.kv.faults import Faults
from epd_serve.kv.slices import SLICE_BYTES
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from tests.waiting import PATIENCE_S, wait_for

BLOCKS, LAYERS, BLOCK_SIZE, HEADS, DIM = 8, 3, 4, 2, 4
BLOCK_BYTES = BLOCK_SIZE * HEADS * DIM
STAGING = 1 << 16
A, B = TransferKey("t-a", "a"), TransferKey("t-b", "b")
Runs = list[tuple[int, int]]


class Decode:
    """A D worker with K and V apart, of [blocks, block_size, heads, dim] uint8, on some device."""

    def __init__(
        self,
        folder: Path,
        *,
        device: DeviceMemory | None = None,
        faults: str = "",
        one_sided: bool = False,
        tp: int = 1,
        trace: str = "",
        gate: CaptureGate | None = None,
    ) -> None:
        self.device = device or HostMemory()
        self.device.enter_thread()
        self.endpoint = f"ipc://{folder}/D0.kvw0"
        shape = (BLOCKS, BLOCK_SIZE, HEADS // tp, DIM)
        self.caches = {f"{i}": (self._zeros(shape), self._zeros(shape)) for i in range(LAYERS)}
        layers = layers_of(self.caches, BLOCKS)
        self.side = ShmReceiveSide(layers, self.device, PacketMemory(self.device, SLICE_BYTES))
        self.receiver = Receiver(
            self.endpoint,
            "D0:1",
            shape_of_rank(layers, tp, 0),
            [self.side, MooncakeReceiveSide(NoEngine)] if one_sided else [self.side],  # type: ignore[arg-type]
            Trace(trace, "D0"),
            device=self.device,
            faults=Faults(faults),
            gate=gate or CaptureGate(),
        )
        self.ended: dict[TransferKey, bool] = {}

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel()
        data = self.device.allocate(size).data
        data.zero_()
        return data.view(shape)

    def expect(self, *keys: TransferKey) -> None:
        self.receiver.expect([Expected(key, f"at-d-{key.child}", (1,)) for key in keys], [])

    def poll(self) -> dict[TransferKey, bool]:
        """What has ended so far: whether it was received."""
        received, failed = self.receiver.take_finished()
        for items, ok in ((received, True), (failed, False)):
            for item in items:
                assert item.key not in self.ended, "reported twice"
                self.ended[item.key] = ok
        return self.ended

    def wait_ended(self, *keys: TransferKey) -> dict[TransferKey, bool]:
        wait_for(lambda: set(keys) <= set(self.poll()))
        return self.ended

    def blocks(self, block: int) -> torch.Tensor:
        """All layers' K and V of one block."""
        return torch.stack([part[block] for kv in self.caches.values() for part in kv])


class NoEngine:
    """A Mooncake endpoint as far as a hello needs one."""

    session, bases, scratch = "10.0.0.4:15001", [4096, 8192], (1 << 21, 4 << 20)


def shape_of_rank(layers: Any, tp: int, rank: int) -> dict[str, Any]:
    agreed = {"names": "x" * len(layers), "block_size": BLOCK_SIZE, "dtype": "uint8", "platform": "test"}
    return shape_of(layers, **agreed, tp=tp, rank=rank, kv_heads_total=HEADS)


class Prefill:
    """A P worker's link, message by message. `kv[layer, part, block]` is what its staged packets carry."""

    def __init__(self, decode: Decode, path: Path, *, rank: int = 0, tp: int = 1, life: str = "P0:1") -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(decode.endpoint)
        self.path, self.life = path, life
        path.write_bytes(bytes(STAGING))
        self.staging = torch.from_file(str(path), shared=True, size=STAGING, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(7 + rank)
        size = (LAYERS, 2, BLOCKS, BLOCK_SIZE, HEADS // tp, DIM)
        self.kv = torch.randint(1, 255, size, dtype=torch.uint8, generator=generator)
        empty = layers_of({f"{i}": (self.kv[i, 0], self.kv[i, 1]) for i in range(LAYERS)}, BLOCKS)
        self.shape = shape_of_rank(empty, tp, rank)
        self._numbers = itertools.count(1)
        self.seq = 0

    def say(self, message: Any) -> None:
        self.socket.send(wire.encode(message))

    def hear(self) -> wire.ToPrefillWorker:
        return wire.to_prefill_worker.decode(self.receive())

    def receive(self) -> bytes:
        assert self.socket.poll(int(PATIENCE_S * 1000)), "D is silent"
        return self.socket.recv()

    def silent(self, for_s: float = 0.05) -> bool:
        return not self.socket.poll(int(for_s * 1000))

    def hello(self, transport: str = "shm", **changes: Any) -> wire.ToPrefillWorker:
        fields = {"version": wire.VERSION, "source": self.life, "transport": transport, "shape": self.shape}
        if transport == "shm":
            fields |= {"staging": str(self.path), "staging_bytes": STAGING}
        self.say(wire.Hello(**{**fields, **changes}))
        return self.hear()

    def stage(self, parts: list[tuple[TransferKey, Runs]], layers: tuple[int, int] = (0, LAYERS)) -> wire.Packet:
        """Puts P's blocks, whose numbers are D's, into the staging memory."""
        self.seq = next(self._numbers)
        carried = [
            self.kv[layer, part, first : first + count].reshape(-1)
            for layer in range(*layers)
            for part in range(2)
            for _, runs in parts
            for first, count in runs
        ]
        data = torch.cat(carried)
        offset = 4096 * (self.seq % 4)
        self.staging[offset : offset + data.numel()] = data
        return wire.Packet(self.seq, offset, layers, parts)

    def packet(self, parts: list[tuple[TransferKey, Runs]], layers: tuple[int, int] = (0, LAYERS)) -> None:
        """A packet, taken."""
        self.say(self.stage(parts, layers))
        assert self.hear() == wire.Credit(self.seq)

    def blocks(self, block: int) -> torch.Tensor:
        return self.kv[:, :, block].reshape(-1, *self.kv.shape[3:])


Start = Callable[..., Decode]
Link = Callable[..., Prefill]
