"""Page-locked memory: who has it, who gives it back, and what happens where it cannot be had."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_ops import buffers
from npu_ops.buffers import PAGE, Bounce, nothing_registered, register_with_cuda
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory, open_memory
from tests.fake_npu.device import FakeDevice, RuleBrokenError
from tests.waiting import wait_for


def entered(**options: bool) -> FakeDevice:
    device = FakeDevice(**options)  # type: ignore[arg-type]
    device.enter_thread()
    return device


def bytes_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", [HostMemory, entered])
@pytest.mark.parametrize("nbytes", [1, 4095, 70000])
def test_a_host_buffer_starts_a_page(make: type[DeviceMemory], nbytes: int) -> None:
    buffer = make().host_buffer(nbytes)
    assert buffer.numel() == nbytes and buffer.data_ptr() % PAGE == 0


@pytest.mark.parametrize("make", [HostMemory, entered])
def test_host_memory_that_is_handed_over_is_on_the_device(make: type[DeviceMemory]) -> None:
    memory, there = make(), bytes_of(300)
    host = memory.host_buffer(300)
    host.copy_(there)
    assert torch.equal(memory.to_host(memory.to_device(host)), there)


# --- registering ------------------------------------------------------------------------------------------------------


class Runtime:
    """Stands for `torch.cuda.cudart()`; results as the binding gives them, enums with a value."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> SimpleNamespace:
        assert nbytes > 0 and flags == 0
        self.calls.append(("register", address))
        return SimpleNamespace(value=self.result)

    def cudaHostUnregister(self, address: int) -> SimpleNamespace:
        self.calls.append(("unregister", address))
        return SimpleNamespace(value=self.result)


def test_cuda_page_locks_memory_that_exists_until_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, data = Runtime(), bytes_of(64)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    undo = register_with_cuda(data, torch.device("cpu"))
    assert runtime.calls == [("register", data.data_ptr())]
    undo()
    assert runtime.calls[1:] == [("unregister", data.data_ptr())]


def test_memory_that_cannot_be_page_locked_is_a_warning_and_its_error_is_not_left_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, launched = Runtime(result=801), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def launch(*size: int, device: torch.device) -> None:
        launched.append(size)
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(torch, "zeros", launch)
    data = bytes_of(64)
    undo = register_with_cuda(data, torch.device("cpu"))
    undo()
    assert launched and runtime.calls == [("register", data.data_ptr())]
    assert "could not be page-locked" in caplog.text


def test_the_fake_notices_memory_registered_twice_and_given_back_twice() -> None:
    device, host = entered(), bytes_of(64)
    undo = device.register_host(host)
    with pytest.raises(RuleBrokenError, match="is registered"):
        device.register_host(host[32:])
    undo()
    assert device.registered == []
    with pytest.raises(RuleBrokenError, match="twice"):
        undo()
    with pytest.raises(RuleBrokenError, match="memory of the device"):
        device.register_host(device.allocate(64).data)


def test_a_device_that_registers_nothing_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    device = entered(registers=False)
    assert device.register_host(bytes_of(64)) is nothing_registered
    assert "copies are slower" in caplog.text
    assert HostMemory().register_host(bytes_of(64)) is nothing_registered


# --- the bounce -------------------------------------------------------------------------------------------------------


def bounce_on(device: FakeDevice, half_bytes: int) -> Bounce:
    """Its copies are late, as `latency_s` says, in both directions."""
    return Bounce(
        device.host_buffer, lambda target, source: device.run(lambda: target.copy_(source)), device.fence, half_bytes
    )


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=4), half_bytes=st.sampled_from([1, 7, 16, 64, 200]))
@settings(max_examples=25, deadline=None)
def test_what_bounces_to_the_device_and_back_is_the_same(sizes: list[int], half_bytes: int) -> None:
    device = entered()
    bounce = bounce_on(device, half_bytes)
    for seed, size in enumerate(sizes):
        there, back = bytes_of(size, seed), torch.zeros(size, dtype=torch.uint8)
        block = device.allocate(size).data
        source = there.clone()
        bounce.upload(block, source)
        source.zero_()  # it was read: nobody has to keep it
        bounce.download(back, block)
        assert torch.equal(back, there)
    assert not device.broken


def test_a_half_is_used_again_only_when_the_device_is_done_with_it() -> None:
    device, gate = entered(), threading.Event()
    bounce, block = bounce_on(device, 8), device.allocate(40).data
    device.run(gate.wait)
    there = bytes_of(40)
    opener = threading.Thread(target=lambda: (wait_for(device.waited_for), gate.set()))
    opener.start()
    bounce.upload(block, there)  # two halves are full and the device has taken neither: it waits
    device.fence()()
    opener.join()
    assert torch.equal(block, there)


def test_a_download_that_fails_leaves_nothing_that_is_still_written() -> None:
    device, moves = entered(), []

    def move(target: torch.Tensor, source: torch.Tensor) -> None:
        moves.append(source)
        if len(moves) == 2:
            raise RuntimeError("device lost")
        device.run(lambda: target.copy_(source))

    device.latency_s = 0.01
    bounce = Bounce(device.host_buffer, move, device.fence, 8)
    there, block = torch.zeros(24, dtype=torch.uint8), device.allocate(24).data
    with pytest.raises(RuntimeError, match="device lost"):
        bounce.download(there, block)
    assert torch.equal(there[:8], block[:8]) and not there[8:].any()
    assert all(half.wait is None and half.target is None for half in bounce._halves)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_copies_from_and_to_memory_that_it_registered() -> None:
    memory, page = open_memory("cuda"), ctypes.create_string_buffer(1 << 20)
    memory.enter_thread()
    host = torch.frombuffer(page, dtype=torch.uint8)
    undo = memory.register_host(host)
    assert host.is_pinned() and memory.host_buffer(1000).is_pinned()
    host.copy_(bytes_of(host.numel()))
    block, back = memory.allocate(host.numel()).data, memory.host_buffer(host.numel())
    memory.upload(block, host)
    memory.download(back, block)
    assert torch.equal(back, host)
    undo()
    assert not host.is_pinned()


def test_halves_are_long_enough_for_the_bus_and_short_beside_a_packet() -> None:
    assert PAGE <= buffers._HALF_BYTES <= 4 << 20
