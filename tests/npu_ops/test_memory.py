"""Device memory: alignment, copies, and sums that are equal on every device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.fake import FakeDevice
from npu_ops.memory import DeviceMemory, DeviceMemoryError, HostMemory, open_memory, proves_total


@pytest.fixture(params=["cpu", "fake"])
def memory(request: pytest.FixtureRequest) -> DeviceMemory:
    made: DeviceMemory = HostMemory() if request.param == "cpu" else FakeDevice()
    made.enter_thread()
    return made


@pytest.mark.parametrize("alignment", [None, 512, 2 << 20])
def test_memory_starts_where_its_transport_wants_it(memory: DeviceMemory, alignment: int | None) -> None:
    block = memory.allocate(1000, alignment)
    assert block.address % (alignment or memory.alignment) == 0
    assert block.data.numel() == 1000 and block.data.data_ptr() == block.address


def test_a_copy_is_there_after_its_fence(memory: DeviceMemory) -> None:
    block = memory.allocate(256)
    memory.copy(block.data, torch.arange(256, dtype=torch.uint8))
    memory.fence()()
    assert block.data.tolist() == list(range(256))
    assert memory.to_host(memory.clone(block.data)).tolist() == list(range(256))


@given(st.binary(min_size=1, max_size=300))
def test_the_sum_of_words_is_that_of_the_reference(data: bytes) -> None:
    words = len(data) // 4
    expected = sum(int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True) for i in range(words)) % (1 << 64)
    assert HostMemory().total(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == expected


def test_a_device_proves_that_it_can_sum(memory: DeviceMemory) -> None:
    assert proves_total(memory) is None


def test_a_device_that_cannot_sum_or_sums_wrongly_is_not_trusted() -> None:
    without = FakeDevice(sums=False)
    without.enter_thread()
    assert "cannot sum" in (proves_total(without) or "")

    class Narrow(HostMemory):
        def total(self, source: torch.Tensor) -> int:
            return super().total(source) & 0xFFFFFFFF

    assert "instead of" in (proves_total(Narrow()) or "")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DeviceMemoryError, match="cpu, cuda or npu"):
        open_memory("tpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_memory_keeps_the_same_contract() -> None:
    cuda = open_memory("cuda")
    cuda.enter_thread()
    assert proves_total(cuda) is None
    block = cuda.allocate(4096)
    assert block.address % cuda.alignment == 0
    cuda.copy(block.data, torch.arange(4096, dtype=torch.int32).to(torch.uint8))
    assert torch.equal(cuda.to_host(cuda.clone(block.data)), torch.arange(4096, dtype=torch.int32).to(torch.uint8))
