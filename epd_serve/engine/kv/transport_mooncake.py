"""KV by Mooncake's Transfer Engine: one-sided writes from P's registered KV cache into D's.

`P2PHANDSHAKE`, no daemon. Protocol `tcp` here, `ascend` and `rdma` by configuration of the same calls. Completion goes
over our own data channel (DONE follows the last write), because Mooncake's notifies do not work on every protocol.
Writes are one-sided, so a late one can land after silence: D quarantines blocks for `quarantine_s` before reuse.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from epd_serve import wire
from epd_serve.engine.kv.regions import Layers, Region
from epd_serve.engine.kv.transport import AwaitMessage, LayerPacket, LinkError, SendMessage
from store.port_filter import reachable_only_at

_MAX_BATCH = 1024  # more than 2048 descriptors in a batch fail
_PENDING, _DONE = 0, 1


class MooncakeEndpoint:
    """The Transfer Engine of one worker, with its KV regions registered. One per process.

    Raises:
        LinkError: Mooncake is not installed or cannot register the memory.
    """

    def __init__(self, layers: Layers, host: str, protocol: str) -> None:
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise LinkError(
                f"kv transport mooncake: {error}. Install the extra `mooncake` and the system package libibverbs1, "
                "or use --kv-transport shm on one host"
            ) from error
        self.engine: Any = TransferEngine()
        with reachable_only_at(host):  # it binds its ports to every address
            started = self.engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if started != 0:
            raise LinkError(f"Mooncake's Transfer Engine does not start on {host} with protocol {protocol}")
        self.session = f"{host}:{self.engine.get_rpc_port()}"
        self.bases = [region.data.data_ptr() for layer in layers for region in layer]
        for start, size in _spans([region for layer in layers for region in layer]):
            if self.engine.register_memory(start, size) != 0:
                raise LinkError(f"Mooncake cannot register {size} bytes of KV cache")


def _spans(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """(address, bytes) of the memory to register: layers may be views of one storage, which registers once."""
    storages = {region.data.untyped_storage().data_ptr(): region.data.untyped_storage() for region in regions}
    return [(address, storage.nbytes()) for address, storage in storages.items()]


class MooncakeSendSide:
    """P's end of one link."""

    name = "mooncake"

    def __init__(self, layers: Layers, endpoint: MooncakeEndpoint, timeout_s: float) -> None:
        self._layers = layers
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._session = ""
        self._bases: list[int] = []
        self._first_region = [0]
        for layer in layers:
            self._first_region.append(self._first_region[-1] + len(layer))

    def hello(self) -> tuple[str, int]:
        return "", 0

    def opened(self, ack: wire.HelloAck) -> None:
        self._session, self._bases = ack.session, list(ack.bases)

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        sources: list[int] = []
        targets: list[int] = []
        sizes: list[int] = []
        for index in range(packet.first, packet.last):
            for offset, region in enumerate(self._layers[index]):
                base = self._bases[self._first_region[index] + offset]
                for run in packet.runs:
                    sources.append(region.data.data_ptr() + run.src * region.block_bytes)
                    targets.append(base + run.dst * region.block_bytes)
                    sizes.append(run.count * region.block_bytes)
        for at in range(0, len(sizes), _MAX_BATCH):
            part = slice(at, at + _MAX_BATCH)
            self._write(sources[part], targets[part], sizes[part])
        return sum(sizes)

    def _write(self, sources: list[int], targets: list[int], sizes: list[int]) -> None:
        engine = self._endpoint.engine
        # The synchronous call spins on a core; polling with short sleeps leaves it to the forward pass.
        batch = engine.batch_transfer_async_write(self._session, sources, targets, sizes)
        if batch == 0:
            raise LinkError(f"Mooncake did not accept a write to {self._session}")
        deadline = time.monotonic() + self._timeout_s
        pause_s = 50e-6
        while (status := engine.transfer_check_status(batch)) == _PENDING:
            if time.monotonic() > deadline:
                raise LinkError(f"a write to {self._session} took longer than {self._timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1e-3)
        if status != _DONE:
            raise LinkError(f"a write to {self._session} failed with status {status}")

    def credit(self, seq: int) -> None:
        """Nothing is staged here."""

    def close(self) -> None:
        """The engine lives as long as the worker."""


class MooncakeReceiveSide:
    """D's end of all links: offers its memory; writes need no help."""

    name = "mooncake"
    quarantine_s = 30.0

    def __init__(self, endpoint: MooncakeEndpoint) -> None:
        self._endpoint = endpoint

    def session(self) -> tuple[str, list[int]]:
        return self._endpoint.session, self._endpoint.bases

    def attach(self, peer: bytes, hello: wire.Hello) -> None:
        """One-sided: nothing to map."""

    def packet(self, peer: bytes, packet: wire.Packet) -> None:
        raise LinkError("a staged packet on a Mooncake link")

    def close(self) -> None:
        """The engine lives as long as the worker."""
