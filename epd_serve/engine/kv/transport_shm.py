"""KV through shared memory on one host: P copies a packet into its staging ring, D copies it out and returns credit.

Two copies, no registration, no daemon, and no late one-sided write: D's listener drops packets of transfers it has
given up. Default on CPU and for pairs of instances on one NPU, where Mooncake's direct transport refuses to connect.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque

import torch

from epd_serve import wire
from epd_serve.engine.kv.regions import Layers
from epd_serve.engine.kv.transport import AwaitMessage, LayerPacket, LinkError, SendMessage, packet_bytes
from epd_serve.kv.plan import Run, split

_ALIGN = 4096


class StagingRing:
    """Which bytes of the staging memory are in use: first in, first out. Pure."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: deque[tuple[int, int, int]] = deque()  # (seq, start, end), oldest first
        self._returned: set[int] = set()

    def take(self, seq: int, size: int) -> int | None:
        """Offset of `size` free contiguous bytes, or None while there are none."""
        size = -(-size // _ALIGN) * _ALIGN
        assert size <= self.capacity
        if not self._held:
            start = 0
        else:
            tail, head = self._held[0][1], self._held[-1][2]
            if head > tail:  # used bytes do not wrap: room behind them, else before them
                start = head if self.capacity - head >= size else 0
                if start == 0 and size > tail:
                    return None
            elif tail - head >= size:
                start = head
            else:
                return None
        self._held.append((seq, start, start + size))
        return start

    def give_back(self, seq: int) -> None:
        """Credit for a packet; space frees in order."""
        self._returned.add(seq)
        while self._held and self._held[0][0] in self._returned:
            self._returned.discard(self._held.popleft()[0])


class ShmSendSide:
    """P's end. `path` is created here and unlinked on close; the launcher also removes it after a crash."""

    name = "shm"

    def __init__(self, layers: Layers, path: str, capacity: int) -> None:
        self._layers = layers
        self._path = path
        capacity += -capacity % _ALIGN  # the ring hands out aligned pieces
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
        blocks = sum(run.count for run in packet.runs)
        total = packet_bytes(self._layers, packet.first, packet.last, blocks)
        if total <= self._ring.capacity // 2:
            self._move(packet.key, packet.first, packet.last, packet.runs, total, send, receive)
            return total
        for layer in range(packet.first, packet.last):  # too big for the ring: layer by layer, then by blocks
            per_block = packet_bytes(self._layers, layer, layer + 1, 1)
            for runs in split(packet.runs, max(1, self._ring.capacity // 2 // per_block)):
                size = per_block * sum(run.count for run in runs)
                self._move(packet.key, layer, layer + 1, runs, size, send, receive)
        return total

    def _move(
        self,
        key: wire.TransferKey,
        first: int,
        last: int,
        runs: tuple[Run, ...],
        size: int,
        send: SendMessage,
        receive: AwaitMessage,
    ) -> None:
        if size > self._ring.capacity:
            raise LinkError(f"one KV block needs {size} bytes, the staging memory has {self._ring.capacity}")
        self._seq += 1
        while (start := self._ring.take(self._seq, size)) is None:
            answer = receive()
            if isinstance(answer, wire.Credit):
                self._ring.give_back(answer.seq)
        at = start
        for layer in self._layers[first:last]:
            for region in layer:
                for run in runs:
                    end = at + run.count * region.block_bytes
                    self._staging[at:end].copy_(region.blocks(run.src, run.count))
                    at = end
        assert at == start + size
        send(wire.Packet(key, self._seq, start, (first, last), [(run.dst, run.count) for run in runs]))

    def credit(self, seq: int) -> None:
        """A credit that arrived outside `move`."""
        self._ring.give_back(seq)

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class ShmReceiveSide:
    """D's end: maps the staging memory of each P that says hello."""

    name = "shm"
    quarantine_s = 0.0

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._staging: dict[bytes, torch.Tensor] = {}
        self._peer_of: dict[str, bytes] = {}  # by staging path

    def session(self) -> tuple[str, list[int]]:
        return "", []

    def attach(self, peer: bytes, hello: wire.Hello) -> None:
        try:
            fd = os.open(hello.staging, os.O_RDWR)
        except OSError as error:
            raise LinkError(f"staging memory {hello.staging} cannot be opened: {error}") from error
        try:
            # Mapped writable because torch wants a writable buffer; never written here.
            view = mmap.mmap(fd, hello.staging_bytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            raise LinkError(f"staging memory {hello.staging} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        # The sender starts anew in this memory: packets of its former connection must not be read from it any more.
        former = self._peer_of.get(hello.staging, peer)
        self._staging.pop(former, None)
        self._peer_of[hello.staging] = peer
        self._staging[peer] = torch.frombuffer(view, dtype=torch.uint8)

    def packet(self, peer: bytes, packet: wire.Packet) -> None:
        staging = self._staging.get(peer)
        if staging is None:
            raise LinkError("packet from a peer that has not said hello")
        self._check(packet, staging.numel())
        at = packet.offset
        for layer in self._layers[slice(*packet.layers)]:
            for region in layer:
                for first, count in packet.runs:
                    end = at + count * region.block_bytes
                    region.blocks(first, count).copy_(staging[at:end])
                    at = end

    def _check(self, packet: wire.Packet, staging_bytes: int) -> None:
        first, last = packet.layers
        inside = 0 <= first < last <= len(self._layers) and packet.offset >= 0
        inside = inside and all(
            start >= 0 and count > 0 and (start + count) * region.block_bytes <= region.data.numel()
            for layer in self._layers[first:last]
            for region in layer
            for start, count in packet.runs
        )
        size = packet_bytes(self._layers, first, last, sum(count for _, count in packet.runs)) if inside else 0
        if not inside or packet.offset + size > staging_bytes:
            raise LinkError(f"a packet outside of the KV cache or the staging memory: {packet}")

    def close(self) -> None:
        self._staging.clear()
