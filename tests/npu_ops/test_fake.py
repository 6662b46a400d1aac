"""The fake device and its fabric are as strict as the hardware: each rule, broken, is noticed."""

from __future__ import annotations

import threading

import pytest
import torch

from npu_ops.fake import FakeDevice, RuleBrokenError
from npu_ops.fake_fabric import FakeFabric, FakePort, SameDeviceError
from npu_ops.memory import MAX_REGIONS, NPU_ALIGNMENT

ONES = torch.ones(64, dtype=torch.uint8)


@pytest.fixture
def device() -> FakeDevice:
    made = FakeDevice()
    made.enter_thread()
    return made


def test_a_write_is_invisible_until_its_stream_gets_there(device: FakeDevice) -> None:
    block = device.allocate(64)
    device.latency_s = 0.05
    device.copy(block.data, ONES)
    assert not torch.equal(block.data, ONES)
    device.fence()()
    assert torch.equal(block.data, ONES)


def test_a_fence_covers_what_was_queued_before_it_and_not_what_comes_after(device: FakeDevice) -> None:
    block, gate = device.allocate(64), threading.Event()
    device.copy(block.data, ONES)
    wait = device.fence()
    device.run(gate.wait)
    device.copy(block.data, ONES * 2)
    wait()
    assert block.data[0] == 1
    gate.set()


def test_streams_of_two_threads_do_not_wait_for_each_other(device: FakeDevice) -> None:
    block, gate = device.allocate(64), threading.Event()
    device.run(gate.wait)
    device.copy(block.data, ONES)
    seen: list[int] = []

    def other() -> None:
        device.enter_thread()
        seen.append(int(device.to_host(block.data)[0]))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen != [1], "another stream saw what was not written yet"
    gate.set()


@pytest.mark.parametrize("call", ["allocate", "copy", "fence", "wait", "to_host", "total", "register", "put"])
def test_a_thread_that_has_not_set_the_device_is_refused(device: FakeDevice, call: str) -> None:
    block, port, wait = device.allocate(64), FakePort(FakeFabric(), device), device.fence()
    port.register(block.address, 64)
    calls = {
        "allocate": lambda: device.allocate(64),
        "copy": lambda: device.copy(block.data, ONES),
        "fence": device.fence,
        "wait": wait,
        "to_host": lambda: device.to_host(block.data),
        "total": lambda: device.total(block.data),
        "register": lambda: port.register(block.address, 64),
        "put": lambda: port.put("k", block.address, 64),
    }
    raised: list[BaseException] = []

    def stranger() -> None:
        try:
            calls[call]()
        except RuleBrokenError as error:
            raised.append(error)

    thread = threading.Thread(target=stranger)
    thread.start()
    thread.join()
    assert raised and device.broken


def test_misaligned_memory_does_not_register(device: FakeDevice) -> None:
    with pytest.raises(RuleBrokenError, match="2 MB"):
        FakePort(FakeFabric(), device).register(device.allocate(64, alignment=512).address, 64)


def test_memory_of_nobody_does_not_register(device: FakeDevice) -> None:
    with pytest.raises(RuleBrokenError, match="not the device's"):
        FakePort(FakeFabric(), device).register(NPU_ALIGNMENT, 64)


def test_the_257th_region_does_not_register(device: FakeDevice) -> None:
    port, block = FakePort(FakeFabric(), device), device.allocate(64)
    for _ in range(MAX_REGIONS):
        port.register(block.address, 64)
    with pytest.raises(RuleBrokenError, match="256"):
        port.register(block.address, 64)


def test_memory_that_is_not_registered_is_neither_read_nor_written(device: FakeDevice) -> None:
    port, block = FakePort(FakeFabric(), device), device.allocate(128)
    port.register(block.address, 64)
    with pytest.raises(RuleBrokenError, match="not registered"):
        port.put("k", block.address, 65)
    with pytest.raises(RuleBrokenError, match="not registered"):
        port.fetch("k", block.address + 64, 1)


@pytest.mark.parametrize("new_cann", [False, True])
def test_two_processes_of_one_device_connect_only_with_a_new_cann(new_cann: bool) -> None:
    fabric = FakeFabric(connects_with_self=new_cann)
    ends = [FakeDevice("host0/npu0"), FakeDevice("host0/npu0")]
    ports = [FakePort(fabric, end) for end in ends]
    blocks = []
    for end, port in zip(ends, ports, strict=True):
        end.enter_thread()
        blocks.append(end.allocate(64))
        port.register(blocks[-1].address, 64)
    ports[0].put("k", blocks[0].address, 64)
    assert ports[0].fetch("k", blocks[0].address, 64) == 64, "a process reaches itself"
    if new_cann:
        assert ports[1].fetch("k", blocks[1].address, 64) == 64
    else:
        with pytest.raises(SameDeviceError):
            ports[1].fetch("k", blocks[1].address, 64)
