"""A transport within one process, both ends: packets are copied by the device straight into D's regions.

For the measurement on a GPU (`bench/micro/pd/one_gpu.py`); a stage never has it. P's link copies on its own stream and
waits, so a packet has arrived when `move` returns, and D's end has nothing to do, as with one-sided writes.
"""

from __future__ import annotations

from collections.abc import Set

from epd_serve import wire
from epd_serve.engine.kv.regions import Layers, LinkPieces
from epd_serve.engine.kv.transport import AwaitMessage, LinkError, SendMessage
from epd_serve.kv.plan import LayerPacket
from epd_serve.wire import TransferKey
from npu_ops.memory import DeviceMemory

_PROBE_BYTES = 4 << 20


class CopySendSide:
    """P's end. `name`: of the path; D's end must have the same."""

    shares_network = False
    largest_move = 1 << 40

    def __init__(self, name: str, source: Layers, target: Layers, device: DeviceMemory) -> None:
        self.name = self.label = name
        self._source = source
        self._target = target
        self._device = device

    @property
    def largest_probe(self) -> int:
        return min(_PROBE_BYTES, int(self._source[0][0].data.numel()))

    def hello(self) -> tuple[str, int]:
        return "", 0

    def opened(self, ack: wire.HelloAck, pieces: LinkPieces | None) -> None:
        assert pieces is None, "both ends have the same heads"

    def probe(self, nbytes: int, send: SendMessage, receive: AwaitMessage) -> None:
        """Before the first prompt, so D's blocks may be overwritten."""
        self._device.copy(self._target[0][0].data[:nbytes], self._source[0][0].data[:nbytes])
        self._device.timed_fence().wait()

    def make_room(self, nbytes: int, receive: AwaitMessage) -> None:
        """D's memory is there."""

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        moved = 0
        for layer in range(packet.first, packet.last):
            for here, there in zip(self._source[layer], self._target[layer], strict=True):
                for run in (run for _, runs in packet.parts for run in runs):
                    self._device.copy(there.blocks(run.dst, run.count), here.blocks(run.src, run.count))
                    moved += run.count * here.block_bytes
        self._device.timed_fence().wait()
        return moved

    def staged(self, key: TransferKey) -> int:
        return 0

    def credit(self, seq: int) -> None:
        """Nothing is staged."""

    def given_up(self) -> int:
        """A copy that was queued is waited for, whatever happens."""
        return 0

    def may_land(self, given_up: int) -> bool:
        return False

    def close(self) -> None:
        """Nothing is held."""


class CopyReceiveSide:
    """D's end."""

    quarantine_s = 0.0

    def __init__(self, name: str) -> None:
        self.name = name

    def session(self) -> tuple[str, list[int]]:
        return "", []

    def scratch(self) -> tuple[int, int]:
        return 0, 0

    def attach(self, peer: bytes, hello: wire.Hello, pieces: LinkPieces | None) -> None:
        """P has D's regions already."""

    def packet(self, peer: bytes, packet: wire.Packet, dropped: Set[TransferKey]) -> None:
        raise LinkError("a staged packet on a path that stages nothing")

    def probe(self, peer: bytes, probe: wire.Probe) -> None:
        raise LinkError("a staged probe on a path that stages nothing")

    def close(self) -> None:
        """Nothing is held."""
