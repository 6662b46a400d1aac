"""Device memory: alignment, copies, and sums that are equal on every device."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from npu_ops.memory import DeviceMemory, DeviceMemoryError
from npu_ops.torch_memory import HostMemory, open_memory
from tests.fake_npu.device import FakeDevice


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


def test_bytes_go_to_the_device_and_come_back(memory: DeviceMemory) -> None:
    block, there, back = memory.allocate(256), torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    memory.upload(block.data, there)
    memory.download(back, block.data)
    assert torch.equal(back, there)


def test_strided_bytes_go_to_the_device_and_come_back(memory: DeviceMemory) -> None:
    """Heads of a block, as between ends of different tensor parallelism."""
    block = memory.allocate(256)
    heads = block.data.view(16, 4, 4)[:, 1:3]
    there, back = torch.arange(128, dtype=torch.uint8).view(16, 2, 4), torch.zeros((16, 2, 4), dtype=torch.uint8)
    memory.upload(block.data, torch.full((256,), 200, dtype=torch.uint8))
    memory.upload(heads, there)
    memory.download(back, heads)
    assert torch.equal(back, there)
    assert memory.to_host(block.data).eq(200).sum() == 128


def test_fences_tell_the_time_between_them(memory: DeviceMemory) -> None:
    first = memory.timed_fence()
    second = memory.timed_fence()
    second.wait()
    apart = second.seconds_since(first)
    assert apart is not None and apart >= 0
    assert first.seconds_since(second) == -apart


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DeviceMemoryError, match="cpu, cuda or npu"):
        open_memory("tpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_memory_keeps_the_same_contract() -> None:
    cuda = open_memory("cuda")
    model_s_stream = torch.cuda.current_stream()
    cuda.enter_thread()
    assert torch.cuda.current_stream() != model_s_stream
    block, there = cuda.allocate(4096), torch.arange(4096, dtype=torch.int32).to(torch.uint8)
    assert block.address % cuda.alignment == 0
    first = cuda.timed_fence()
    cuda.upload(block.data, there)
    second = cuda.timed_fence()
    second.wait()
    apart = second.seconds_since(first)
    assert apart is not None and apart >= 0
    back = torch.zeros_like(there)
    cuda.download(back, block.data)
    assert torch.equal(back, there)


class Recorded:
    """Stands for `torch.npu`: notes what is called, and knows no more than the contract in memory.py lists."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reached = False
        outer = self

        class Event:
            def __init__(self, *, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                outer.calls.append("record")

            def query(self) -> bool:
                return outer.reached

            def elapsed_time(self, end: Event) -> float:
                return 2500.0  # ms

        self.Event = Event

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"set_device {device}")

    def Stream(self, device: torch.device) -> str:
        self.calls.append(f"Stream {device}")
        return "a stream"

    def set_stream(self, stream: str) -> None:
        self.calls.append(f"set_stream {stream}")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    module = Recorded()
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(torch, "device", lambda kind, index: f"{kind}:{index}")
    return module


def test_a_thread_enters_an_npu_with_its_device_and_one_stream_of_its_own(npu: Recorded) -> None:
    memory = open_memory("npu", 3)
    memory.enter_thread()
    memory.enter_thread()
    assert npu.calls == [
        "set_device npu:3",
        "Stream npu:3",
        "set_stream a stream",
        "set_device npu:3",
        "set_stream a stream",
    ]


def test_a_fence_of_an_npu_is_an_event_with_a_time(npu: Recorded) -> None:
    memory = open_memory("npu")
    first, second = memory.timed_fence(), memory.timed_fence()
    assert second.seconds_since(first) is None, "not reached: nobody waits for a measurement"
    npu.reached = True
    second.wait()
    assert second.seconds_since(first) == 2.5
    assert npu.calls == ["record", "record"]


def test_pageable_memory_bounces_to_an_npu_and_back_and_page_locked_memory_does_not(
    npu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, locked, npu.reached = open_memory("npu"), set[int](), True

    def buffer(nbytes: int) -> torch.Tensor:
        made = torch.zeros(nbytes, dtype=torch.uint8)
        locked.add(made.data_ptr())
        return made

    monkeypatch.setattr(memory, "host_buffer", buffer)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda data: data.data_ptr() in locked)
    there, block, back = (torch.full((5000,), value, dtype=torch.uint8) for value in (3, 0, 0))
    memory.upload(block, there)
    memory.download(back, block)
    assert torch.equal(back, there) and len(locked) == 2, "two halves, made once"
    assert npu.calls == ["record", "record"]
    memory.upload(block, buffer(5000))
    memory.download(there, block.view(50, 100).view(-1))
    assert len(locked) == 3 and not there.any()
