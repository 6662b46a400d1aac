"""The fabric of fake devices is as strict as the hardware: each rule, broken, is noticed."""

from __future__ import annotations

import threading

import pytest

from npu_ops.fake.device import FakeDevice, RuleBrokenError
from npu_ops.fake.fabric import FakeFabric, FakePort, SameDeviceError
from npu_ops.memory import MAX_REGIONS, NPU_ALIGNMENT


@pytest.fixture
def device() -> FakeDevice:
    made = FakeDevice()
    made.enter_thread()
    return made


def test_a_thread_that_has_not_set_the_device_neither_registers_nor_puts(device: FakeDevice) -> None:
    block, port = device.allocate(64), FakePort(FakeFabric(), device)
    port.register(block.address, 64)
    raised: list[BaseException] = []

    def stranger() -> None:
        for call in (lambda: port.register(block.address, 64), lambda: port.put("k", block.address, 64)):
            try:
                call()
            except RuleBrokenError as error:
                raised.append(error)

    thread = threading.Thread(target=stranger)
    thread.start()
    thread.join()
    assert len(raised) == len(device.broken) == 2


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
