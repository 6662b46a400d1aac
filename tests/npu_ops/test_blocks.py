"""Every way to gather and scatter blocks is the plain slicing of bytes, whatever the runs, pieces and sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_ops.blocks import BlockRun, Blocks, BlocksError, Indices, proves_blocks, scatter_by_index
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import CudaMemory, HostMemory, NpuMemory, open_memory
from tests.fake_npu.device import FakeDevice, RuleBrokenError

FEW = settings(max_examples=40, deadline=None)


class IndexedHost(CudaMemory):
    """The ways of a device with streams, over the memory of the host."""

    def __init__(self) -> None:
        super().__init__(0)
        self.device = torch.device("cpu")

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        return source


class Copying(IndexedHost):
    """A device that has failed its proof."""

    def _moves_by_index(self) -> bool:
        return False


@dataclass(frozen=True)
class Case:
    """Geometry of each row of blocks, runs, and how far the memory is from an address that is a multiple of 8."""

    rows: tuple[tuple[int, int, int, int, int], ...]  # block_bytes, offset, rows, row_bytes, stride
    blocks: int
    runs: tuple[BlockRun, ...]
    off: int

    @property
    def flat_bytes(self) -> int:
        return sum(run.count for run in self.runs) * sum(count * row_bytes for _, _, count, row_bytes, _ in self.rows)

    def memory(self, device: DeviceMemory, seed: int) -> tuple[list[Blocks], torch.Tensor]:
        """Rows of random bytes, and flat memory of other random bytes."""
        chance = torch.Generator().manual_seed(seed)

        def some(nbytes: int) -> torch.Tensor:
            data = device.allocate(nbytes + self.off).data[self.off :]
            device.copy(data, torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=chance))
            return data

        return [Blocks(some(self.blocks * row[0]), *row) for row in self.rows], some(self.flat_bytes)

    def bytes_of(self, rows: Sequence[bytes]) -> list[tuple[int, int, int, bool]]:
        """(row of blocks, its byte, byte of the flat memory's, wanted), by the definition of a piece."""
        found, at = [], 0
        for index, (block_bytes, offset, count, row_bytes, stride) in enumerate(self.rows):
            for run in self.runs:
                for block in range(run.first, run.first + run.count):
                    for row in range(count):
                        start = block * block_bytes + offset + row * stride
                        found += [(index, start + byte, at + byte, run.wanted) for byte in range(row_bytes)]
                        at += row_bytes
        return found


@st.composite
def cases(draw: st.DrawFn, *, once: bool = False) -> Case:
    """`once`: no block is in two runs."""
    blocks = draw(st.integers(1, 12))
    geometries = []
    for _ in range(draw(st.integers(1, 3))):
        word = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16]))
        row_bytes, gap, offset, count = (draw(st.integers(low, high)) for low, high in ((1, 4), (0, 3), (0, 3), (1, 4)))
        stride = row_bytes + gap
        block = offset + (count - 1) * stride + row_bytes + draw(st.integers(0, 2))
        geometries.append((block * word, offset * word, count, row_bytes * word, stride * word))
    if once:
        cuts = sorted(draw(st.sets(st.integers(0, blocks), min_size=2)))
        pairs = draw(st.permutations(list(itertools.pairwise(cuts))))
        runs = [(first, end - first) for first, end in pairs]
    else:
        firsts = draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=5))
        runs = [(first, draw(st.integers(1, blocks - first))) for first in firsts]
    wanted = [BlockRun(first, count, draw(st.booleans())) for first, count in runs]
    return Case(tuple(geometries), blocks, tuple(wanted), draw(st.sampled_from([0, 0, 1, 2, 4])))


WAYS: dict[str, Callable[[], DeviceMemory]] = {
    "slices": HostMemory, "index": IndexedHost, "unproven": Copying, "fake": FakeDevice
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@given(case=cases(), seed=st.integers(0, 99))
@FEW
def test_gathering_is_slicing(way: str, case: Case, seed: int) -> None:
    device = _entered(way)
    rows, flat = case.memory(device, seed)
    device.gather(flat, rows, case.runs)
    _settle(device)
    plain = [bytes(row.data.tolist()) for row in rows]
    expected = bytearray(case.flat_bytes)
    for row, source, target, _ in case.bytes_of(plain):
        expected[target] = plain[row][source]
    assert bytes(flat.tolist()) == bytes(expected)


@pytest.mark.parametrize("way", WAYS)
@given(case=cases(once=True), seed=st.integers(0, 99))
@FEW
def test_scattering_changes_the_wanted_bytes_and_no_others(way: str, case: Case, seed: int) -> None:
    device = _entered(way)
    rows, flat = case.memory(device, seed)
    _settle(device)
    expected, packet = [bytearray(row.data.tolist()) for row in rows], bytes(flat.tolist())
    for row, target, source, wanted in case.bytes_of([bytes(data) for data in expected]):
        if wanted:
            expected[row][target] = packet[source]
    device.scatter(rows, case.runs, flat)
    _settle(device)
    assert [bytes(row.data.tolist()) for row in rows] == [bytes(data) for data in expected]


def _entered(way: str) -> DeviceMemory:
    device = WAYS[way]()
    if way == "fake":
        device.enter_thread()
    return device


def _settle(device: DeviceMemory) -> None:
    if isinstance(device, FakeDevice):
        device.fence()()
        assert not device.broken


def test_words_are_as_wide_as_the_geometry_and_the_addresses_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []
    select = torch.index_select

    def noted(table: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append((table.dtype, tuple(table.shape)))
        return select(table, dim, index, out=out)

    monkeypatch.setattr(torch, "index_select", noted)
    device = IndexedHost()
    device._by_index = True
    data, flat = (torch.zeros(4 * 48 + 8, dtype=torch.uint8) for _ in range(2))
    runs = [BlockRun(1, 2)]
    device.gather(flat[:96], [Blocks(data[:192], 48, 0, 1, 48, 48)], runs)  # whole blocks
    device.gather(flat[:32], [Blocks(data[:192], 48, 8, 2, 8, 24)], runs)  # 8 of every 24 bytes
    device.gather(flat[:12], [Blocks(data[:192], 48, 6, 1, 6, 6)], runs)
    device.gather(flat[4:100], [Blocks(data[:192], 48, 0, 1, 48, 48)], runs)  # flat memory at a multiple of 4 only
    assert seen == [
        (torch.int64, (4, 6)),
        (torch.int64, (24, 1)),
        (torch.int16, (32, 3)),
        (torch.int32, (4, 12)),
    ]


class Counting(IndexedHost):
    """`uploads`: every index that went to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[list[int]] = []
        self._by_index = True

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        self.uploads.append(source.tolist())
        return source


def test_one_kernel_moves_all_runs_of_a_row_and_rows_of_one_geometry_share_their_index() -> None:
    device = Counting()
    rows = [Blocks(torch.zeros(64, dtype=torch.uint8), 8, 0, 1, 8, 8) for _ in range(6)]
    device.gather(torch.zeros(6 * 32, dtype=torch.uint8), rows, [BlockRun(6, 2), BlockRun(1, 1), BlockRun(3, 1)])
    assert device.uploads == [[6, 7, 1, 3]]


def test_slices_of_one_packet_share_an_index_and_other_blocks_have_another() -> None:
    device = Counting()
    rows = [Blocks(torch.arange(64, dtype=torch.uint8), 8, 0, 1, 8, 8) for _ in range(4)]
    flat = torch.zeros(16, dtype=torch.uint8)
    for row in rows:  # a slice for each layer
        device.gather(flat, [row], [BlockRun(6, 1), BlockRun(1, 1)])
    assert device.uploads == [[6, 1]]
    device.gather(flat, rows[:1], [BlockRun(1, 2)])
    assert flat.tolist() == list(range(8, 24))
    device.scatter(rows[:1], [BlockRun(1, 1), BlockRun(2, 1, wanted=False)], flat)
    assert device.uploads == [[6, 1], [1, 2], [1]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("runs", "flat_bytes", "reason"),
    [
        ([BlockRun(7, 2)], 16, "block 8 of a row of 8"),
        ([BlockRun(-1, 1)], 8, "cannot be"),
        ([BlockRun(2, 0)], 0, "cannot be"),
        ([BlockRun(0, 2)], 15, "16 bytes of blocks, 15"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_moves(
    way: str, runs: list[BlockRun], flat_bytes: int, reason: str
) -> None:
    device = _entered(way)
    flat = device.allocate(16).data[:flat_bytes]
    rows = [Blocks(device.allocate(64).data, 8, 0, 1, 8, 8)]
    for move in (lambda: device.gather(flat, rows, runs), lambda: device.scatter(rows, runs, flat)):
        with pytest.raises(BlocksError, match=reason):
            move()


def test_the_fake_refuses_memory_that_is_not_its_own_and_a_block_named_twice() -> None:
    device = FakeDevice()
    device.enter_thread()
    mine, host = device.allocate(64).data, torch.zeros(64, dtype=torch.uint8)
    flat, runs = device.allocate(8).data, [BlockRun(0, 1)]

    def row(data: torch.Tensor) -> list[Blocks]:
        return [Blocks(data, 8, 0, 1, 8, 8)]

    twice = [BlockRun(0, 1), BlockRun(0, 1)]
    for wrong in (
        lambda: device.gather(flat, row(host), runs),
        lambda: device.gather(host[:8], row(mine), runs),
        lambda: device.scatter(row(host), runs, flat),
        lambda: device.scatter(row(mine), runs, host[:8]),
        lambda: device.scatter(row(mine), twice, device.allocate(16).data),
    ):
        before = len(device.broken)
        with pytest.raises(RuleBrokenError):
            wrong()
        assert len(device.broken) == before + 1


def test_a_way_that_moves_bytes_wrongly_fails_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert proves_blocks(IndexedHost(), cpu) is None

    class Narrow(IndexedHost):
        def scatter_indexed(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
            whole = [replace(run, wanted=True) for run in runs]
            scatter_by_index(rows, whole, source, Indices(self.to_device))

    class Without(IndexedHost):
        def gather_indexed(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
            raise RuntimeError("no kernel for int64")

    assert proves_blocks(Narrow(), cpu) == "cuda:0 moves blocks in words of 8 bytes wrongly"
    assert proves_blocks(Without(), cpu) == "cuda:0 cannot move blocks by index: no kernel for int64"
    device, rows = Without(), [Blocks(torch.arange(64, dtype=torch.uint8), 8, 0, 1, 8, 8)]
    flat = torch.zeros(8, dtype=torch.uint8)
    device.gather(flat, rows, [BlockRun(2, 1)])
    assert flat.tolist() == list(range(16, 24)), "an unproven device copies runs one by one"


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_device_moves_blocks_by_index(kind: str) -> None:
    if not (kind == "cuda" and torch.cuda.is_available()):
        pytest.skip(f"no {kind} device")
    memory = open_memory(kind)
    assert isinstance(memory, CudaMemory | NpuMemory)
    memory.enter_thread()
    assert proves_blocks(memory, memory.device) is None
