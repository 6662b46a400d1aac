"""D's end of shared memory: what it has mapped is registered with its device once, and given back."""

from __future__ import annotations

from pathlib import Path

import torch

from epd_serve import wire
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.regions import layers_of
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.kv.slices import SLICE_BYTES
from tests.fake_npu.device import FakeDevice

BLOCKS, BLOCK_BYTES, STAGING = 4, 64, 8192


def side_on(device: FakeDevice) -> ShmReceiveSide:
    device.enter_thread()
    cache = device.allocate(BLOCKS * BLOCK_BYTES).data.view(BLOCKS, BLOCK_BYTES)
    return ShmReceiveSide(layers_of({"layer.0": cache}, BLOCKS), device, PacketMemory(device, SLICE_BYTES))


def hello(folder: Path, name: str) -> wire.Hello:
    path = folder / name
    path.write_bytes(bytes(STAGING))
    return wire.Hello(wire.VERSION, "P0:1", "shm", {}, str(path), STAGING)


def test_a_sender_that_comes_again_is_registered_once(tmp_path: Path) -> None:
    device = FakeDevice()
    side = side_on(device)
    side.attach(b"one", hello(tmp_path, "a"), None)
    side.attach(b"two", hello(tmp_path, "b"), None)
    assert len(device.registered) == 2
    side.attach(b"three", hello(tmp_path, "a"), None)  # one's memory, by another connection
    side.attach(b"two", hello(tmp_path, "c"), None)  # other memory, by the same connection
    assert len(device.registered) == 2
    side.close()
    assert device.registered == [] and device.broken == []


def test_a_device_gathers_before_the_first_packet_comes(tmp_path: Path) -> None:
    """Where the first gathering proves or compiles kernels, no packet waits for it."""
    device, gathered = FakeDevice(), list[int]()
    side = side_on(device)
    gather = device.gather

    def noted(target: torch.Tensor, *rest: object) -> None:
        gathered.append(target.numel())
        gather(target, *rest)  # type: ignore[arg-type]

    device.gather = noted  # type: ignore[method-assign,assignment]
    side.attach(b"one", hello(tmp_path, "a"), None)
    assert gathered == [BLOCK_BYTES]
    device.fence()()
    assert device.broken == []
