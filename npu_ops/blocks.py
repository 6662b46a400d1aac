"""Blocks of a row, or one piece of each, gathered into flat memory in the order of a packet, and scattered back.

The reference is plain slicing: one copy per run of adjacent blocks (`gather_by_copies`, `scatter_by_copies`). On a CPU
it is also the fastest way. On a device each copy is a launch of 5 µs and more, and blocks that a free list hands out
are rarely adjacent: a packet of 8 MiB in blocks of 16 KiB is 512 launches, which take longer than its bytes take on the
bus. There one indexed kernel per row of blocks does it (`gather_by_index`, `scatter_by_index`): `index_select` into
the packet, `index_copy_` out of it, on words as wide as the geometry divides. Both are held equal to the reference by
property tests on CPU tensors. They have not run on an NPU or a GPU; `proves_blocks` tries them there before use.

A piece is indexed as rows of a contiguous table, never as a strided view: an NPU's operators make a contiguous copy of
a strided operand first, which here is the whole KV cache.

Why there is no Triton path for CUDA. A packet's bytes leave over a bus of at most 50 GB/s (PCIe 5) after they were
gathered in memory of 2 TB/s and more. `index_select` moves 8 bytes a thread; at only a quarter of that memory's speed
8 MiB take 2 * 8 MiB / 0.5 TB/s = 34 µs, beside 168 µs on the bus; a perfect kernel would take 8 µs and win 26 µs, or
13 %, once for a packet that goes to the very next host. The launches it would save, one per row of a packet of about 8
layers, are 8 * 5 µs, and a launch through Triton costs its own 10 to 20 µs. Rows of 4 KiB and more are long enough for
`index_select` to read whole cache lines; so a kernel of ours could win a tenth of the copy that it precedes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Copy = Callable[[torch.Tensor, torch.Tensor], None]  # (target, source) of one shape
ToDevice = Callable[[torch.Tensor], torch.Tensor]  # an index on the host → the same where the blocks are


@dataclass(frozen=True)
class BlockRun:
    """`count` adjacent blocks from `first` on. Not `wanted`: a scatter passes over their bytes."""

    first: int
    count: int
    wanted: bool = True


class BlocksError(ValueError):
    """A run outside of the blocks, or flat memory of another size. Found before anything is queued."""


@dataclass(frozen=True)
class Blocks:
    """A row of equal blocks, and which piece of each is meant.

    `data`: flat uint8 of [blocks * block_bytes]. A piece: `rows` rows of `row_bytes` from `offset` on, `stride` apart.
    """

    data: torch.Tensor
    block_bytes: int
    offset: int
    rows: int
    row_bytes: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Of the piece of one block."""
        return self.rows * self.row_bytes

    def part(self, first: int, count: int) -> torch.Tensor:
        """The pieces of adjacent blocks, a view of [count, rows, row_bytes]."""
        return torch.as_strided(
            self.data,
            (count, self.rows, self.row_bytes),
            (self.block_bytes, self.stride, 1),
            self.data.storage_offset() + first * self.block_bytes + self.offset,
        )

    @property
    def unit(self) -> int:
        """The most bytes of which blocks, rows and all distances between them are multiples."""
        return math.gcd(self.block_bytes, self.offset, self.row_bytes, self.stride if self.rows > 1 else 0)

    def index(self, blocks: torch.Tensor) -> torch.Tensor:
        """Which units these blocks' pieces are, in their order. int64 of [blocks * nbytes / unit]."""
        rows = torch.arange(self.rows)[:, None] * self.stride + torch.arange(0, self.row_bytes, self.unit)[None, :]
        return (((blocks * self.block_bytes + self.offset)[:, None] + rows.view(1, -1)) // self.unit).view(-1)


def check_blocks(rows: Sequence[Blocks], runs: Sequence[BlockRun], flat: torch.Tensor) -> None:
    """Raises BlocksError unless `flat` has room for just these runs of each row, and the rows have the blocks."""
    count = sum(run.count for run in runs)
    if any(run.first < 0 or run.count <= 0 for run in runs):
        raise BlocksError(f"a run of blocks that cannot be: {list(runs)}")
    end = max((run.first + run.count for run in runs), default=0)
    for row in rows:
        if end * row.block_bytes > row.data.numel():
            raise BlocksError(f"block {end - 1} of a row of {row.data.numel() // row.block_bytes}")
    nbytes = sum(row.nbytes for row in rows) * count
    if flat.numel() != nbytes:
        raise BlocksError(f"{nbytes} bytes of blocks, {flat.numel()} bytes of flat memory")


def gather_by_copies(copy: Copy, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
    """The reference. `target`: flat uint8; per row, per run, per block. What is not wanted is gathered all the same."""
    check_blocks(rows, runs, target)
    for flat, part, _ in _pieces(target, rows, runs):
        copy(flat, part)


def scatter_by_copies(copy: Copy, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
    """The reference, the other way. Of a block that is named twice the last bytes stay; only here."""
    check_blocks(rows, runs, source)
    for flat, part, wanted in _pieces(source, rows, runs):
        if wanted:
            copy(part, flat)


class Indices:
    """Which words of memory the last runs are: slices of one packet have the same. For one thread and its stream.

    Args:
        to_device: of the few index words; queued like the kernels that read them.
    """

    def __init__(self, to_device: ToDevice) -> None:
        self._to_device = to_device
        self._runs: tuple[BlockRun, ...] = ()
        self._stretches: list[tuple[int, torch.Tensor]] = []
        self._by_geometry: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def of(self, row: Blocks, runs: tuple[BlockRun, ...]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Per stretch of wanted runs: how many blocks come before it, how many it has, and their index."""
        if runs != self._runs:
            self._runs, self._stretches, self._by_geometry = runs, list(_stretches(runs)), {}
        geometry = (row.block_bytes, row.offset, row.rows, row.row_bytes, row.stride)
        if geometry not in self._by_geometry:
            self._by_geometry[geometry] = [self._to_device(row.index(blocks)) for _, blocks in self._stretches]
        for (before, blocks), index in zip(self._stretches, self._by_geometry[geometry], strict=True):
            yield before, len(blocks), index


def gather_by_index(target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun], indices: Indices) -> None:
    """Like `gather_by_copies`, by one kernel per row."""
    check_blocks(rows, runs, target)
    wanted = tuple(replace(run, wanted=True) for run in runs)
    for flat, table, index in _indexed(target, rows, wanted, indices):
        torch.index_select(table, 0, index, out=flat)


def scatter_by_index(rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor, indices: Indices) -> None:
    """Like `scatter_by_copies`, by one kernel per row and stretch of wanted runs."""
    check_blocks(rows, runs, source)
    for flat, table, index in _indexed(source, rows, tuple(runs), indices):
        table.index_copy_(0, index, flat)


def _pieces(
    flat: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(flat bytes, blocks' bytes) of equal shape, and whether they are wanted: per row, per run."""
    at = 0
    for row in rows:
        for run in runs:
            part = row.part(run.first, run.count)
            yield flat[at : at + part.numel()].view(part.shape), part, run.wanted
            at += part.numel()


def _indexed(
    flat: torch.Tensor, rows: Sequence[Blocks], runs: tuple[BlockRun, ...], indices: Indices
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(flat words, table of words, which rows of the table): per row of blocks, per stretch of wanted runs."""
    total = sum(run.count for run in runs)
    at = 0
    for row in rows:
        for before, count, index in indices.of(row, runs):
            start = at + before * row.nbytes
            piece = flat[start : start + count * row.nbytes]
            words = _WORDS[math.gcd(row.unit, _address(row.data), _address(piece), 8)]
            width = row.unit // words.itemsize
            yield piece.view(words).view(-1, width), row.data.view(words).view(-1, width), index
        at += total * row.nbytes


def _stretches(runs: Sequence[BlockRun]) -> Iterator[tuple[int, torch.Tensor]]:
    """Blocks of neighbouring runs that are wanted, and how many blocks come before them."""
    before, stretch = 0, list[torch.Tensor]()
    for run in runs:
        if run.wanted:
            stretch.append(torch.arange(run.first, run.first + run.count))
        elif stretch:
            blocks = torch.cat(stretch)
            yield before - len(blocks), blocks
            stretch = []
        before += run.count
    if stretch:
        blocks = torch.cat(stretch)
        yield before - len(blocks), blocks


def _address(data: torch.Tensor) -> int:
    """What both the address and torch's idea of it, the offset in the storage, are multiples of."""
    return math.gcd(data.data_ptr(), data.storage_offset())


class MovesBlocks(Protocol):
    """What is put to the proof: a device's own way to gather and scatter (`DeviceMemory` has the contract)."""

    name: str

    def to_host(self, source: torch.Tensor) -> torch.Tensor: ...

    def gather_indexed(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None: ...

    def scatter_indexed(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None: ...


def proves_blocks(memory: MovesBlocks, device: torch.device) -> str | None:
    """Why the indexed way cannot be trusted on this device, or None: it is tried on bytes that are known.

    In words of every width, whole blocks and pieces, some of them passed over. The calling thread has entered.
    """
    runs = (BlockRun(5, 2), BlockRun(0, 1, wanted=False), BlockRun(3, 1))
    for unit in _WORDS:
        there, back = (torch.arange(8 * 6 * unit, dtype=torch.int32).to(torch.uint8) ^ flip for flip in (0, 0xFF))
        whole, piece = (0, 1, 6 * unit, 6 * unit), (unit, 2, unit, 3 * unit)
        for geometry in (whole, piece):
            right = (there.clone(), back.clone())
            rows_right, rows = (
                [Blocks(data, 6 * unit, *geometry) for data in pair]
                for pair in (right, (there.to(device), back.to(device)))
            )
            flat_right = torch.zeros(4 * rows[0].nbytes, dtype=torch.uint8)
            flat = flat_right.to(device)
            try:
                memory.gather_indexed(flat, rows[:1], runs)
                memory.scatter_indexed(rows[1:], runs, flat)
                actual = [memory.to_host(data) for data in (flat, rows[1].data)]
            except (RuntimeError, TypeError) as error:
                return f"{memory.name} cannot move blocks by index: {error}"
            gather_by_copies(_copied, flat_right, rows_right[:1], runs)
            scatter_by_copies(_copied, rows_right[1:], runs, flat_right)
            if not (torch.equal(actual[0], flat_right) and torch.equal(actual[1], right[1])):
                return f"{memory.name} moves blocks in words of {unit} bytes wrongly"
    return None


def _copied(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
