"""KV through shared memory on one host, D's end: maps each sender's staging memory, copies packets out of it.

What `packet` and `probe` copy has arrived when they return: the device's copies are waited for, as the staging memory
is used again after the credit, and DONE may follow at once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from epd_serve import wire
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.regions import Layers, LinkPieces, Pieces, Region, cut_layers, whole_blocks
from epd_serve.engine.kv.transport import LinkError
from epd_serve.kv.heads import Piece
from npu_ops.blocks import BlockRun, Blocks
from npu_ops.memory import DeviceMemory


@dataclass(frozen=True)
class _Sender:
    """A link: the staging memory of P's worker, registered with the device, and what of D's blocks comes through it."""

    path: str
    staging: torch.Tensor
    pieces: Pieces
    unregister: Callable[[], None]


class ShmReceiveSide:
    """D's end of all links. Every call but the first comes from one thread.

    Args:
        device: whose memory `layers` is. memory: of it, that packets land in, and probes too.
    """

    name = "shm"
    quarantine_s = 0.0

    def __init__(self, layers: Layers, device: DeviceMemory, memory: PacketMemory) -> None:
        self._layers = layers
        self._device = device
        self._memory = memory
        self._whole = whole_blocks(layers)
        self._senders: dict[bytes, _Sender] = {}

    def session(self) -> tuple[str, list[int]]:
        return "", []

    def scratch(self) -> tuple[int, int]:
        return 0, 0

    def attach(self, peer: bytes, hello: wire.Hello, pieces: LinkPieces | None) -> None:
        staging = _map(hello.staging, hello.staging_bytes)
        if not self._device.host_visible:  # a device's first gathering is slow: not that of a packet
            region = self._layers[0][0]
            with self._memory.borrow(region.block_bytes) as memory:
                self._device.gather(memory, [region.cut(self._whole[0][0])], [BlockRun(0, 1)])
                self._device.timed_fence().wait()
        # The sender starts anew in this memory: packets of its former connection must not be read from it any more.
        replaced = [it for it, sender in self._senders.items() if it == peer or sender.path == hello.staging]
        for former in replaced:
            self._senders.pop(former).unregister()
        self._senders[peer] = _Sender(
            hello.staging,
            staging,
            self._whole if pieces is None else pieces.mine,
            self._device.register_host(staging),
        )

    def packet(self, peer: bytes, packet: wire.Packet, dropped: Set[wire.TransferKey]) -> None:
        sender = self._sender(peer)
        size = self._check(packet, sender)
        staged = sender.staging[packet.offset : packet.offset + size]
        rows = cut_layers(self._layers, sender.pieces, *packet.layers)
        runs = [BlockRun(first, count, key not in dropped) for key, runs in packet.parts for first, count in runs]
        if self._device.host_visible:
            self._scatter(rows, runs, staged)
            return
        with self._memory.borrow(size) as landed:  # one copy over the bus instead of one per run of blocks
            self._device.upload(landed, staged)
            self._scatter(rows, runs, landed)

    def probe(self, peer: bytes, probe: wire.Probe) -> None:
        staging, end = self._sender(peer).staging, probe.offset + probe.nbytes
        if probe.offset < 0 or probe.nbytes <= 0 or end > staging.numel():
            raise LinkError(f"a probe outside of the staging memory: {probe}")
        with self._memory.borrow(probe.nbytes) as memory:
            self._device.upload(memory, staging[probe.offset : end])
            self._device.timed_fence().wait()

    def close(self) -> None:
        while self._senders:
            self._senders.popitem()[1].unregister()

    def _sender(self, peer: bytes) -> _Sender:
        if peer not in self._senders:
            raise LinkError("a packet from a peer that has not said hello")
        return self._senders[peer]

    def _scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], staged: torch.Tensor) -> None:
        try:
            self._device.scatter(rows, runs, staged)
        finally:  # also where a copy was refused: those before it must not land in blocks that are given back
            self._device.timed_fence().wait()

    def _walk(self, packet: wire.Packet, pieces: Pieces) -> Iterator[tuple[Region, Piece]]:
        """The regions of the packet's layers, in the order of its bytes."""
        layers = slice(*packet.layers)
        for regions, cut in zip(self._layers[layers], pieces[layers], strict=True):
            yield from zip(regions, cut, strict=True)

    def _check(self, packet: wire.Packet, sender: _Sender) -> int:
        """Its bytes. Raises LinkError where it would read or write outside of what is ours."""
        first, last = packet.layers
        inside = 0 <= first < last <= len(self._layers) and packet.offset >= 0
        inside = inside and all(
            start >= 0 and count > 0 and (start + count) * region.block_bytes <= region.data.numel()
            for region, _ in self._walk(packet, sender.pieces)
            for _, runs in packet.parts
            for start, count in runs
        )
        blocks = sum(count for _, runs in packet.parts for _, count in runs)
        size = blocks * sum(piece.nbytes for _, piece in self._walk(packet, sender.pieces)) if inside else 0
        if not inside or packet.offset + size > sender.staging.numel():
            raise LinkError(f"a packet outside of the KV cache or the staging memory: {packet}")
        return size


def _map(path: str, nbytes: int) -> torch.Tensor:
    """Raises LinkError."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise LinkError(f"staging memory {path} cannot be opened: {error}") from error
    try:
        # Mapped writable because torch wants a writable buffer; never written here. Populated: else the first packets
        # would wait for a page fault every 4 KiB.
        view = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except (OSError, ValueError, OverflowError) as error:
        raise LinkError(f"staging memory {path} cannot be mapped: {error}") from error
    finally:
        os.close(fd)
    return torch.frombuffer(view, dtype=torch.uint8)
