"""KV through shared memory on one host, P's end: packets are copied into a staging ring, out of which D copies them.

Two copies, no registration, no daemon, and no late one-sided write: D's listener drops packets of transfers it has
given up. Default on CPU and for pairs of instances on one NPU, where Mooncake's direct transport refuses to connect.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from epd_serve import wire
from epd_serve.engine.kv.regions import Layers, LinkPieces
from epd_serve.engine.kv.staging_ring import ALIGN, StagingRing
from epd_serve.engine.kv.transport import AwaitMessage, LinkError, SendMessage
from epd_serve.kv.plan import LayerPacket
from epd_serve.wire import TransferKey
from npu_ops.memory import DeviceMemory

_LARGEST_MOVE = 8 << 20  # of device memory that each link gathers in
_LARGEST_PROBE = 4 << 20


class ShmSendSide:
    """P's end.

    Args:
        path: made at the first `hello` and unlinked on close; the launcher also removes it after a crash.
        capacity: bytes of staging memory.
        device: whose memory the KV cache is.
    """

    name = label = "shm"
    shares_network = False

    def __init__(self, layers: Layers, path: str, capacity: int, device: DeviceMemory) -> None:
        capacity += -capacity % ALIGN  # the ring hands out aligned pieces
        self.largest_move = min(capacity // 2, _LARGEST_MOVE)
        self.largest_probe = min(capacity // 2, _LARGEST_PROBE)
        self._layers = layers
        self._pieces: LinkPieces | None = None
        self._path = path
        self._device = device
        self._ring = StagingRing(capacity)
        self._seq = 0
        self._staged: Counter[TransferKey] = Counter()
        self._staging: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None

    def hello(self) -> tuple[str, int]:
        if self._staging is None:
            self._staging = self._make()
        return self._path, self._ring.capacity

    def opened(self, ack: wire.HelloAck, pieces: LinkPieces | None) -> None:
        """A new peer holds no packets of ours."""
        self._pieces = pieces
        self._ring = StagingRing(self._ring.capacity)
        self._staged.clear()

    def probe(self, nbytes: int, send: SendMessage, receive: AwaitMessage) -> None:
        kv = self._layers[0][0].data  # any bytes will do, but they are to be read the way KV is
        whole, rest = divmod(nbytes, kv.numel())
        start = self._take(nbytes, receive)
        self._stage(start, nbytes, [*(kv for _ in range(whole)), kv[:rest]])
        send(wire.Probe(self._seq, start, nbytes))
        while (answer := receive()) != wire.Credit(self._seq):
            self._heed(answer)
        self._ring.give_back(self._seq)

    def make_room(self, nbytes: int, receive: AwaitMessage) -> None:
        if nbytes > self._ring.capacity:
            raise LinkError(f"one KV block needs {nbytes} bytes, the staging memory has {self._ring.capacity}")
        while not self._ring.fits(nbytes):
            self._heed(receive())

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        sources = list(self._sources(packet))
        size = sum(source.numel() for source in sources)
        start = self._take(size, receive)
        self._stage(start, size, sources)
        parts = [(key, [(run.dst, run.count) for run in runs]) for key, runs in packet.parts]
        send(wire.Packet(self._seq, start, (packet.first, packet.last), parts))
        self._staged.update(key for key, _ in packet.parts)
        return size

    def staged(self, key: TransferKey) -> int:
        return self._staged.pop(key, 0)

    def credit(self, seq: int) -> None:
        """A credit that arrived outside of the calls above."""
        self._ring.give_back(seq)

    def may_land(self) -> bool:
        """D copies, and drops what it has given up."""
        return False

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _heed(self, answer: wire.ToPrefillWorker) -> None:
        if isinstance(answer, wire.Credit):
            self._ring.give_back(answer.seq)
        elif isinstance(answer, wire.HelloRefused):
            raise LinkError(f"refused: {answer.reason}")

    def _take(self, nbytes: int, receive: AwaitMessage) -> int:
        self.make_room(nbytes, receive)
        self._seq += 1
        start = self._ring.take(self._seq, nbytes)
        assert start is not None
        return start

    def _sources(self, packet: LayerPacket) -> Iterator[torch.Tensor]:
        """Views of P's blocks in the order of `wire.Packet`: per layer, per region, per part, per run."""
        for index in range(packet.first, packet.last):
            for place, region in enumerate(self._layers[index]):
                piece = None if self._pieces is None else self._pieces.mine[index][place]
                for _, runs in packet.parts:
                    for run in runs:
                        if piece is None:
                            yield region.blocks(run.src, run.count)
                        else:
                            yield region.part(run.src, run.count, piece)

    def _stage(self, start: int, nbytes: int, sources: Sequence[torch.Tensor]) -> None:
        """Copy to the staging memory; done on return."""
        assert self._staging is not None
        target = self._staging[start : start + nbytes]
        if self._device.host_visible:
            _lay(target, sources, self._device.download)
        else:  # one copy over the bus instead of one per run of blocks, each of which would be waited for
            gathered = self._gather_memory(nbytes)
            _lay(gathered, sources, self._device.copy)
            self._device.download(target, gathered)

    def _gather_memory(self, nbytes: int) -> torch.Tensor:
        if self._gathered is None or self._gathered.numel() < nbytes:
            self._gathered = self._device.allocate(max(nbytes, self.largest_move)).data
        return self._gathered[:nbytes]

    def _make(self) -> torch.Tensor:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        try:
            fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(fd, 0, self._ring.capacity)
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                memory = mmap.mmap(fd, self._ring.capacity, flags)
            finally:
                os.close(fd)
        except OSError as error:
            raise LinkError(f"staging memory {self._path} cannot be made: {error}") from error
        return torch.frombuffer(memory, dtype=torch.uint8)


def _lay(
    target: torch.Tensor, sources: Sequence[torch.Tensor], copy: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Copy views one behind the other into flat memory."""
    at = 0
    for source in sources:
        end = at + source.numel()
        copy(target[at:end].view(source.shape), source)
        at = end
    assert at == target.numel()
