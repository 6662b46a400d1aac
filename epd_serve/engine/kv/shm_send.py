"""KV through shared memory on one host, P's end: packets are copied into a staging ring, out of which D copies them.

Two copies, no registration, no daemon, and no late one-sided write: D's listener drops packets of transfers it has
given up. Default on CPU and for pairs of instances on one NPU, where Mooncake's direct transport refuses to connect.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from epd_serve import wire
from epd_serve.engine.kv.regions import Layers
from epd_serve.engine.kv.staging_ring import ALIGN, StagingRing
from epd_serve.engine.kv.transport import AwaitMessage, LayerPacket, LinkError, SendMessage, packet_bytes
from epd_serve.kv.plan import split


class ShmSendSide:
    """P's end. `path` is created here and unlinked on close; the launcher also removes it after a crash."""

    name = "shm"

    def __init__(self, layers: Layers, path: str, capacity: int) -> None:
        self._layers = layers
        self._path = path
        capacity += -capacity % ALIGN  # the ring hands out aligned pieces
        self._ring = StagingRing(capacity)
        self._seq = 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, capacity)
            self._map = mmap.mmap(fd, capacity, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(fd)
        self._staging = torch.frombuffer(self._map, dtype=torch.uint8)

    def hello(self) -> tuple[str, int]:
        return self._path, self._ring.capacity

    def opened(self, ack: wire.HelloAck) -> None:
        """A new peer holds no packets of ours."""
        self._ring = StagingRing(self._ring.capacity)

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        total = packet_bytes(self._layers, packet.first, packet.last, packet.blocks)
        if total <= self._ring.capacity // 2:
            self._move(packet, total, send, receive)
            return total
        for layer in range(packet.first, packet.last):  # too big for the ring: layer by layer, then by blocks
            per_block = packet_bytes(self._layers, layer, layer + 1, 1)
            for key, runs in packet.parts:
                for some in split(runs, max(1, self._ring.capacity // 2 // per_block)):
                    piece = LayerPacket(layer, layer + 1, ((key, some),))
                    self._move(piece, per_block * piece.blocks, send, receive)
        return total

    def _move(self, packet: LayerPacket, size: int, send: SendMessage, receive: AwaitMessage) -> None:
        if size > self._ring.capacity:
            raise LinkError(f"one KV block needs {size} bytes, the staging memory has {self._ring.capacity}")
        self._seq += 1
        while (start := self._ring.take(self._seq, size)) is None:
            answer = receive()
            if isinstance(answer, wire.Credit):
                self._ring.give_back(answer.seq)
        at = start
        for layer in self._layers[packet.first : packet.last]:
            for region in layer:
                for _, runs in packet.parts:
                    for run in runs:
                        end = at + run.count * region.block_bytes
                        self._staging[at:end].copy_(region.blocks(run.src, run.count))
                        at = end
        assert at == start + size
        parts = [(key, [(run.dst, run.count) for run in runs]) for key, runs in packet.parts]
        send(wire.Packet(self._seq, start, (packet.first, packet.last), parts))

    def credit(self, seq: int) -> None:
        """A credit that arrived outside `move`."""
        self._ring.give_back(seq)

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
