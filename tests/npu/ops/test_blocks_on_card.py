"""Gathering and scattering of blocks on a card is the CPU's plain slicing, and what it gains is printed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_ops.blocks import BlockRun, Blocks, gather_by_copies, proves_blocks
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import CudaMemory, NpuMemory
from tests.npu.report import Report
from tests.npu_ops.test_blocks import Case, cases

FEW = settings(max_examples=60, deadline=None)
ROUNDS = 20
LAYERS, BLOCKS, BLOCK_BYTES = 16, 512, 16 << 10
"""A packet of 16 rows of 32 blocks that a free list has handed out: 8 MiB, never two adjacent ones."""
RUNS = [BlockRun(first, 1) for first in range(BLOCKS - 2, BLOCKS - 2 - 64, -2)]


def on_host(rows: list[Blocks]) -> list[bytes]:
    return [bytes(row.data.cpu().tolist()) for row in rows]


@given(case=cases(), seed=st.integers(0, 99))
@FEW
def test_gathering_is_slicing(memory: DeviceMemory, case: Case, seed: int) -> None:
    rows, flat = case.memory(memory, seed)
    memory.gather(flat, rows, case.runs)
    memory.fence()()
    plain, expected = on_host(rows), bytearray(case.flat_bytes)
    for row, source, target, _ in case.bytes_of(plain):
        expected[target] = plain[row][source]
    assert bytes(flat.cpu().tolist()) == bytes(expected)


@given(case=cases(once=True), seed=st.integers(0, 99))
@FEW
def test_scattering_changes_the_wanted_bytes_and_no_others(memory: DeviceMemory, case: Case, seed: int) -> None:
    rows, flat = case.memory(memory, seed)
    memory.fence()()
    expected, packet = [bytearray(data) for data in on_host(rows)], bytes(flat.cpu().tolist())
    for row, target, source, wanted in case.bytes_of([bytes(data) for data in expected]):
        if wanted:
            expected[row][target] = packet[source]
    memory.scatter(rows, case.runs, flat)
    memory.fence()()
    assert on_host(rows) == [bytes(data) for data in expected]


def test_a_card_moves_blocks_by_one_kernel_per_row(memory: DeviceMemory) -> None:
    """Where the proof fails blocks are copied one by one: right, and slow. This says why it failed."""
    if not isinstance(memory, CudaMemory | NpuMemory):
        pytest.skip("host memory is sliced; a card has kernels")
    assert proves_blocks(memory, memory.device) is None


def test_a_packet_is_gathered_and_timed(memory: DeviceMemory, report: Report) -> None:
    rows = [
        Blocks(memory.allocate(BLOCKS * BLOCK_BYTES).data, BLOCK_BYTES, 0, 1, BLOCK_BYTES, BLOCK_BYTES)
        for _ in range(LAYERS)
    ]
    for number, row in enumerate(rows):
        memory.copy(row.data, torch.full((BLOCKS * BLOCK_BYTES,), number, dtype=torch.uint8))
    packet = memory.allocate(LAYERS * len(RUNS) * BLOCK_BYTES).data
    ways: dict[str, Callable[[], None]] = {
        "gather_us": lambda: memory.gather(packet, rows, RUNS),
        "gather_by_copies_us": lambda: gather_by_copies(memory.copy, packet, rows, RUNS),
    }
    for name, gather in ways.items():
        gather()  # the first one proves and warms
        begun = memory.timed_fence()
        for _ in range(ROUNDS):
            gather()
        ended = memory.timed_fence()
        ended.wait()
        took_s = ended.seconds_since(begun)
        assert took_s is not None
        told = {"mib": packet.numel() >> 20, "runs": LAYERS * len(RUNS)}
        report.figure(name, round(1e6 * took_s / ROUNDS, 1), launch=memory.name, **told)
    sums = memory.to_host(packet).view(LAYERS, -1)
    assert torch.equal(sums, torch.arange(LAYERS, dtype=torch.uint8)[:, None].expand_as(sums))
