"""KV through shared memory on one host, P's end: packets are copied into a staging ring, out of which D copies them.

Two copies, no registration, no daemon, and no late one-sided write: D's listener drops packets of transfers it has
given up. Default on CPU and for pairs of instances on one NPU, where Mooncake's direct transport refuses to connect.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from epd_serve import wire
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.regions import Layers, LinkPieces, Pieces, Region, cut_layers, whole_blocks
from epd_serve.engine.kv.transport import AwaitMessage, LinkError, SendMessage
from epd_serve.kv.heads import Piece
from epd_serve.kv.plan import LayerPacket
from epd_serve.kv.slices import LARGEST_PROBE_BYTES, SLICE_BYTES
from epd_serve.wire import TransferKey
from npu_ops.blocks import BlockRun, Blocks
from npu_ops.buffers import nothing_registered
from npu_ops.memory import DeviceMemory

ALIGN = 4096


class StagingRing:
    """Which bytes of the staging memory are in use: first in, first out, whatever order they come back in."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: deque[tuple[int, int, int]] = deque()  # (seq, start, end), oldest first
        self._returned: set[int] = set()

    def take(self, seq: int, size: int) -> int | None:
        """Offset of `size` free contiguous bytes, or None while there are none."""
        size = -(-size // ALIGN) * ALIGN
        start = self._free(size)
        if start is not None:
            self._held.append((seq, start, start + size))
        return start

    def fits(self, size: int) -> bool:
        """Whether `take` would find room."""
        return self._free(-(-size // ALIGN) * ALIGN) is not None

    def _free(self, size: int) -> int | None:
        assert size <= self.capacity
        if not self._held:
            return 0
        tail, head = self._held[0][1], self._held[-1][2]
        if head > tail:  # used bytes do not wrap: room behind them, else before them
            if self.capacity - head >= size:
                return head
            return 0 if size <= tail else None
        return head if tail - head >= size else None

    def give_back(self, seq: int) -> None:
        """Credit for a packet; space frees in order."""
        self._returned.add(seq)
        while self._held and self._held[0][0] in self._returned:
            self._returned.discard(self._held.popleft()[0])


class ShmSendSide:
    """P's end.

    Args:
        path: made at the first `hello` and unlinked on close; the launcher also removes it after a crash.
        capacity: bytes of staging memory.
        device: whose memory the KV cache is. memory: of it, to gather in; shared with the worker's other links.
    """

    name = label = "shm"
    shares_network = False

    def __init__(self, layers: Layers, path: str, capacity: int, device: DeviceMemory, memory: PacketMemory) -> None:
        capacity += -capacity % ALIGN  # the ring hands out aligned pieces
        self.largest_move = min(capacity // 2, SLICE_BYTES)
        self.largest_probe = min(capacity // 2, LARGEST_PROBE_BYTES)
        self._layers = layers
        self._pieces: Pieces | None = None
        self._path = path
        self._device = device
        self._memory = memory
        self._ring = StagingRing(capacity)
        self._seq = 0
        self._staged: Counter[TransferKey] = Counter()
        self._staging: torch.Tensor | None = None
        self._unregister: Callable[[], None] = nothing_registered

    def hello(self) -> tuple[str, int]:
        if self._staging is None:
            self._staging = self._make()
            self._unregister = self._device.register_host(self._staging)
        return self._path, self._ring.capacity

    def opened(self, ack: wire.HelloAck, pieces: LinkPieces | None) -> None:
        """A new peer holds no packets of ours."""
        self._pieces = whole_blocks(self._layers) if pieces is None else pieces.mine
        self._ring = StagingRing(self._ring.capacity)
        self._staged.clear()

    def probe(self, nbytes: int, send: SendMessage, receive: AwaitMessage) -> None:
        start = self._take(nbytes, receive)
        self._stage(start, nbytes, _any_blocks(self._layers[0][0], nbytes))
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
        assert self._pieces is not None, "the link is open"
        rows = cut_layers(self._layers, self._pieces, packet.first, packet.last)
        runs = [BlockRun(run.src, run.count) for _, runs in packet.parts for run in runs]
        size = packet.blocks * sum(row.nbytes for row in rows)
        start = self._take(size, receive)
        self._stage(start, size, [(rows, runs)])
        parts = [(key, [(run.dst, run.count) for run in runs]) for key, runs in packet.parts]
        send(wire.Packet(self._seq, start, (packet.first, packet.last), parts))
        self._staged.update(key for key, _ in packet.parts)
        return size

    def staged(self, key: TransferKey) -> int:
        return self._staged.pop(key, 0)

    def credit(self, seq: int) -> None:
        """A credit that arrived outside of the calls above."""
        self._ring.give_back(seq)

    def given_up(self) -> int:
        """D copies, and drops what it has given up."""
        return 0

    def may_land(self, given_up: int) -> bool:
        return False

    def close(self) -> None:
        self._unregister()
        self._unregister = nothing_registered
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

    def _stage(self, start: int, nbytes: int, blocks: Iterable[tuple[Sequence[Blocks], Sequence[BlockRun]]]) -> None:
        """Gather to the staging memory; done on return."""
        assert self._staging is not None
        target = self._staging[start : start + nbytes]
        if self._device.host_visible:
            self._gather(target, blocks)
            return
        with self._memory.borrow(nbytes) as gathered:
            self._gather(gathered, blocks)
            # Over a bus one copy, instead of one per run of blocks, each of which would be waited for.
            self._device.download(target, gathered)

    def _gather(self, target: torch.Tensor, blocks: Iterable[tuple[Sequence[Blocks], Sequence[BlockRun]]]) -> None:
        at = 0
        for rows, runs in blocks:
            end = at + sum(row.nbytes for row in rows) * sum(run.count for run in runs)
            self._device.gather(target[at:end], rows, runs)
            at = end
        assert at == target.numel()

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


def _any_blocks(region: Region, nbytes: int) -> Iterator[tuple[list[Blocks], list[BlockRun]]]:
    """So many bytes of blocks, whichever, to be read the way KV is."""
    count, rest = divmod(nbytes, region.block_bytes)
    rounds, left = divmod(count, region.data.numel() // region.block_bytes)
    runs = [BlockRun(0, (count - left) // rounds)] * rounds if rounds else []
    runs += [BlockRun(0, left)] if left else []
    for row_bytes, some in ((region.block_bytes, runs), (rest, [BlockRun(0, 1)])):
        if row_bytes and some:
            yield [region.cut(Piece(0, 1, row_bytes, row_bytes))], some
