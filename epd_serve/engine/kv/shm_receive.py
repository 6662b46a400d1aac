"""KV through shared memory on one host, D's end: maps each sender's staging memory, copies packets out of it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Set

import torch

from epd_serve import wire
from epd_serve.engine.kv.regions import Layers
from epd_serve.engine.kv.transport import LinkError, packet_bytes


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

    def packet(self, peer: bytes, packet: wire.Packet, dropped: Set[wire.TransferKey]) -> None:
        staging = self._staging.get(peer)
        if staging is None:
            raise LinkError("packet from a peer that has not said hello")
        self._check(packet, staging.numel())
        at = packet.offset
        for layer in self._layers[slice(*packet.layers)]:
            for region in layer:
                for key, runs in packet.parts:
                    for first, count in runs:
                        end = at + count * region.block_bytes
                        if key not in dropped:
                            region.blocks(first, count).copy_(staging[at:end])
                        at = end

    def _check(self, packet: wire.Packet, staging_bytes: int) -> None:
        first, last = packet.layers
        inside = 0 <= first < last <= len(self._layers) and packet.offset >= 0
        inside = inside and all(
            start >= 0 and count > 0 and (start + count) * region.block_bytes <= region.data.numel()
            for layer in self._layers[first:last]
            for region in layer
            for _, runs in packet.parts
            for start, count in runs
        )
        blocks = sum(count for _, runs in packet.parts for _, count in runs)
        size = packet_bytes(self._layers, first, last, blocks) if inside else 0
        if not inside or packet.offset + size > staging_bytes:
            raise LinkError(f"a packet outside of the KV cache or the staging memory: {packet}")

    def close(self) -> None:
        self._staging.clear()
