"""What transfers ask of device memory, asked of a card: the protocol of `npu_ops/memory.py`, held against the CPU's."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from npu_ops.memory import DeviceMemory, proves_total
from tests.npu.report import Report

MIB = 1 << 20
COPIES = 8
FENCE_S = 10.0


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * MIB + 5])
def test_memory_starts_where_transports_want_it(memory: DeviceMemory, nbytes: int) -> None:
    block = memory.allocate(nbytes)
    assert block.address == block.data.data_ptr()
    assert block.address % memory.alignment == 0
    assert block.data.numel() == block.nbytes == nbytes


def test_bytes_come_back_as_they_went(memory: DeviceMemory) -> None:
    sent = pattern(3 * MIB + 5)
    block = memory.allocate(sent.numel())
    memory.upload(block.data, sent)
    memory.fence()()
    assert torch.equal(memory.to_host(block.data), sent)
    received = torch.empty_like(sent)
    memory.download(received, block.data)
    assert torch.equal(received, sent)


def test_copies_within_the_device_are_done_at_their_fence(memory: DeviceMemory) -> None:
    first = memory.allocate(16 * MIB)
    memory.upload(first.data, pattern(16 * MIB))
    last = first
    for _ in range(COPIES):
        following = memory.allocate(16 * MIB)
        memory.copy(following.data, last.data)
        last = following
    memory.fence()()
    assert torch.equal(memory.to_host(last.data), pattern(16 * MIB))
    assert torch.equal(memory.clone(last.data).cpu(), pattern(16 * MIB))


def test_strided_copies_touch_only_their_rows(memory: DeviceMemory) -> None:
    """As packets do: some blocks of a KV region, not all."""
    block = memory.allocate(64 * 4096)
    rows = block.data.view(64, 4096)
    memory.upload(block.data, torch.zeros(64 * 4096, dtype=torch.uint8))
    sent = pattern(16 * 4096).view(16, 4096)
    memory.upload(rows[8:40:2], sent)
    memory.fence()()
    received = torch.empty_like(sent)
    memory.download(received, rows[8:40:2])
    assert torch.equal(received, sent)
    whole = memory.to_host(block.data).view(64, 4096)
    assert not whole[:8].any() and not whole[9:40:2].any() and not whole[40:].any()


def test_sums_on_the_device_can_be_trusted(memory: DeviceMemory) -> None:
    assert proves_total(memory) is None


def test_a_fence_of_one_thread_is_waited_for_by_another(memory: DeviceMemory) -> None:
    block, sent = memory.allocate(16 * MIB), pattern(16 * MIB, seed=1)
    found: list[torch.Tensor] = []
    memory.upload(block.data, sent)
    wait = memory.fence()

    def read() -> None:
        memory.enter_thread()
        wait()
        found.append(memory.to_host(block.data))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(FENCE_S)
    assert not thread.is_alive(), "event.synchronize() hangs: before CANN 8.5.RC1 it may"
    assert torch.equal(found[0], sent)


def test_timed_fences_tell_device_time(memory: DeviceMemory, report: Report) -> None:
    block, other = memory.allocate(64 * MIB), memory.allocate(64 * MIB)
    memory.copy(other.data, block.data)  # the first copy pays for more than the copy
    begun = memory.timed_fence()
    for _ in range(COPIES):
        memory.copy(other.data, block.data)
    ended = memory.timed_fence()
    ended.wait()
    took_s = ended.seconds_since(begun)
    assert took_s is not None and took_s > 0
    report.figure("device_copy_gb_per_s", round(2 * COPIES * 64 * MIB / took_s / 1e9, 1), launch=memory.name)


def test_host_copies_are_timed(memory: DeviceMemory, report: Report) -> None:
    block, host = memory.allocate(64 * MIB), pattern(64 * MIB)
    for name, copy in (
        ("upload_gb_per_s", lambda: memory.upload(block.data, host)),
        ("download_gb_per_s", lambda: memory.download(host, block.data)),
    ):
        copy()
        memory.fence()()
        begun = time.perf_counter()
        copy()
        memory.fence()()
        report.figure(name, round(64 * MIB / (time.perf_counter() - begun) / 1e9, 2), launch=memory.name)
