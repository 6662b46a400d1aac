"""KV by Mooncake, P's end: one-sided writes from P's registered KV cache into D's."""

from __future__ import annotations

import time

from epd_serve import wire
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.regions import Layers
from epd_serve.engine.kv.transport import AwaitMessage, LayerPacket, LinkError, SendMessage

_MAX_BATCH = 1024  # more than 2048 descriptors in a batch fail
_PENDING, _DONE = 0, 1


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
                for _, runs in packet.parts:
                    for run in runs:
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
