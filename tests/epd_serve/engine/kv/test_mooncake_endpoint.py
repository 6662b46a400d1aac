"""One worker's Transfer Engine: what it registers, how it is told to behave, and what it says when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from epd_serve.engine.kv import mooncake_endpoint
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.regions import Layers, flat_regions, layers_of
from epd_serve.engine.kv.transport import LinkError
from store.mooncake import client
from store.mooncake.client import process_engine
from tests.epd_serve.engine.kv.fakes import HOST, SCRATCH
from tests.fake_npu.device import FakeDevice
from tests.waiting import PATIENCE_S, wait_for

MB = 1 << 20


@pytest.fixture(autouse=True)
def _the_environment_stays_as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class RecordingEngine:
    """Mooncake's calls; fails where it is told to."""

    def __init__(self, *, initializes: int = 0, registers: int = 0) -> None:
        self.registered: list[tuple[int, int]] = []
        self.initialized: tuple[Any, ...] = ()
        self.limit = ""
        self._answers = initializes, registers

    def initialize(self, *arguments: str) -> int:
        self.initialized = arguments
        self.limit = os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"]
        return self._answers[0]

    def get_rpc_port(self) -> int:
        return 15001

    def register_memory(self, address: int, nbytes: int) -> int:
        self.registered.append((address, nbytes))
        return self._answers[1]


def host_layers() -> Layers:
    storage = torch.zeros(64, dtype=torch.uint8)
    return layers_of({"a": storage[8:24].view(4, 4), "b": storage[24:40].view(4, 4)}, 4)


def test_it_registers_the_cache_once_and_scratch_memory_for_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", raising=False)
    layers, engine = host_layers(), RecordingEngine()
    endpoint = MooncakeEndpoint(flat_regions(layers), "127.0.0.1", "tcp", HOST, SCRATCH, lambda: engine)
    assert engine.initialized == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    assert endpoint.session == "127.0.0.1:15001"
    assert endpoint.bases == [layers[0][0].data.data_ptr(), layers[1][0].data.data_ptr()]
    assert engine.registered == [(endpoint.bases[0], 32), endpoint.scratch]
    assert endpoint.scratch[1] == 4 * MB
    assert engine.limit == "65535"


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "2000")
    engine = RecordingEngine()
    MooncakeEndpoint(flat_regions(host_layers()), "127.0.0.1", "tcp", HOST, SCRATCH, lambda: engine)
    assert engine.limit == "2000"


def test_on_a_device_all_that_is_registered_is_aligned_and_the_devices() -> None:
    device = FakeDevice()
    device.enter_thread()
    keys, values = device.allocate(2 * MB), device.allocate(2 * MB)
    layers = layers_of({"a": (keys.data.view(8, -1), values.data[:MB].view(8, -1))}, 8)
    engine = RecordingEngine()
    MooncakeEndpoint(flat_regions(layers), "127.0.0.1", "ascend", device, device.allocate(4 * MB), lambda: engine)
    assert len(engine.registered) == 3
    assert all(address % (2 * MB) == 0 and device.owns(address, nbytes) for address, nbytes in engine.registered)
    assert not device.broken


def test_over_ascend_the_engine_is_the_one_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device, engine = FakeDevice(), RecordingEngine()
    device.enter_thread()
    monkeypatch.setattr(client, "_process_engines", [])
    monkeypatch.setattr(mooncake_endpoint, "transfer_engine", lambda: engine)
    block = device.allocate(2 * MB)
    layers = layers_of({"a": (block.data.view(8, -1),)}, 8)
    endpoint = MooncakeEndpoint(flat_regions(layers), "127.0.0.1", "ascend", device, device.allocate(4 * MB))
    assert endpoint.engine is engine is process_engine(RecordingEngine, "127.0.0.1", "ascend")


def test_a_cache_in_too_many_pieces_is_refused_before_the_engine_starts() -> None:
    engine = RecordingEngine()
    layers = layers_of({str(i): torch.zeros(4, 2) for i in range(256)}, 4)
    with pytest.raises(LinkError, match="256 regions in 256 separate allocations, and at most 254 spans"):
        MooncakeEndpoint(flat_regions(layers), "127.0.0.1", "tcp", HOST, SCRATCH, lambda: engine)
    assert not engine.initialized


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (RecordingEngine(initializes=-1), "does not start on 127.0.0.1 with protocol tcp"),
        (RecordingEngine(registers=-1), "cannot register 32 bytes at 0x"),
    ],
)
def test_an_engine_that_refuses_is_named(engine: RecordingEngine, said: str) -> None:
    with pytest.raises(LinkError, match=said):
        MooncakeEndpoint(flat_regions(host_layers()), "127.0.0.1", "tcp", HOST, SCRATCH, lambda: engine)


@pytest.mark.mooncake
@pytest.mark.slow
def test_mooncake_takes_more_writes_at_once_than_it_lets_wait_by_default() -> None:
    """Its default of 1024 waiting slices fails one write of 200 MB, and every one that follows it."""
    source, target = (torch.full((16, 8 * MB), value, dtype=torch.uint8) for value in (7, 0))
    endpoint = MooncakeEndpoint(
        flat_regions(layers_of({"p": source, "d": target}, 16)), "127.0.0.1", "tcp", HOST, SCRATCH
    )
    here, there = endpoint.bases
    writes = [(here, there, source.numel())]
    writes += [(here + 4096 * i, there + 4096 * i, 2048) for i in range(5000)]
    for part in (writes[:1], writes[1:], writes[:10]):
        batch = endpoint.engine.batch_transfer_async_write(endpoint.session, *map(list, zip(*part, strict=True)))
        assert batch
        status = wait_for(lambda batch=batch: endpoint.engine.transfer_check_status(batch), "the batch to end")
        assert status == 1
    assert torch.equal(source, target)


@pytest.mark.mooncake
@pytest.mark.slow
def test_kv_goes_to_an_ipv6_address() -> None:
    """In a process of its own: how Mooncake looks for peers is decided once, when it is loaded."""
    code = (
        "import torch\n"
        "from tests.epd_serve.engine.kv.test_mooncake_endpoint import *\n"
        "source, target = (torch.full((16, 4096), value, dtype=torch.uint8) for value in (7, 0))\n"
        "endpoint = MooncakeEndpoint([source.view(-1), target.view(-1)], '::1', 'tcp', HOST, SCRATCH)\n"
        "here, there = endpoint.bases\n"
        "code = endpoint.engine.transfer_sync_write(endpoint.session, here, there, source.numel())\n"
        "print(code, endpoint.session.startswith('[::1]:'), torch.equal(source, target))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["0", "True", "True"], done.stderr
