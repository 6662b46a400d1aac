"""The fake Transfer Engine: Mooncake's calls and answers, Ascend's rules, and writes that look at no stream."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch

from npu_ops.memory import MAX_REGIONS, NPU_ALIGNMENT, DeviceBlock
from tests.fake_npu.device import FakeDevice
from tests.fake_npu.engine import MAX_DESCRIPTORS, MINUS_ONE, EngineCrashedError, FakeTransferEngine
from tests.fake_npu.network import DONE, FAILED, MAX_WAITING, PENDING, TOO_LATE, FakeNetwork, Fault
from tests.waiting import PATIENCE_S

ONES = torch.ones(64, dtype=torch.uint8)


@dataclass
class Process:
    """A process on a device, with an engine and 64 registered bytes."""

    device: FakeDevice
    engine: FakeTransferEngine
    session: str
    block: DeviceBlock

    @classmethod
    def on(cls, place: str, network: FakeNetwork) -> Process:
        device = FakeDevice(place)
        device.enter_thread()
        engine = FakeTransferEngine(network, device)
        assert engine.initialize("10.0.0.1", "P2PHANDSHAKE", "ascend", "") == 0
        block = device.allocate(64)
        assert engine.register_memory(block.address, 64) == 0
        return cls(device, engine, f"10.0.0.1:{engine.get_rpc_port()}", block)

    def write(self, other: Process, nbytes: int = 64) -> int:
        """The batch that writes all bytes of this one's block into the other's."""
        return self.engine.batch_transfer_async_write(
            other.session, [self.block.address], [other.block.address], [nbytes]
        )

    def ended(self, batch: int) -> int:
        """The status that the batch ends with."""
        deadline = time.monotonic() + PATIENCE_S
        while (status := self.engine.transfer_check_status(batch)) == PENDING:
            assert time.monotonic() < deadline
            time.sleep(1e-4)
        return status


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def p(network: FakeNetwork) -> Process:
    return Process.on("host0/npu0", network)


@pytest.fixture
def d(network: FakeNetwork) -> Process:
    return Process.on("host0/npu1", network)


def test_a_write_changes_the_other_ends_memory_and_is_then_done(p: Process, d: Process) -> None:
    p.device.upload(p.block.data, ONES)
    p.device.fence()()
    assert p.ended(p.write(d)) == DONE
    assert torch.equal(d.block.data, ONES)
    assert not p.device.broken and not d.device.broken


def test_a_write_reads_its_source_when_it_runs(network: FakeNetwork, p: Process, d: Process) -> None:
    network.gate.clear()
    batch = p.write(d)
    assert p.engine.transfer_check_status(batch) == PENDING and p.engine.pending == 1
    p.block.data.fill_(7)
    network.gate.set()
    assert p.ended(batch) == DONE and p.engine.pending == 0
    assert d.block.data.eq(7).all()


def test_a_write_does_not_wait_for_any_stream(p: Process, d: Process) -> None:
    gate = threading.Event()
    p.device.run(gate.wait)
    p.device.upload(p.block.data, ONES)
    assert p.ended(p.write(d)) == DONE
    assert not d.block.data.eq(1).any()
    gate.set()


def test_writes_take_the_time_of_their_bytes(network: FakeNetwork, p: Process, d: Process) -> None:
    network.latency_s, network.bytes_per_s = 0.005, 64 / 0.01
    began = time.perf_counter()
    assert p.ended(p.write(d)) == DONE
    assert time.perf_counter() - began >= 0.015


def test_writes_of_one_engine_run_in_order(network: FakeNetwork, p: Process, d: Process) -> None:
    network.gate.clear()
    first, second = p.write(d), p.write(d)
    network.gate.set()
    assert p.ended(second) == DONE
    assert p.engine.transfer_check_status(first) == DONE


@pytest.mark.parametrize("new_cann", [False, True])
def test_two_processes_of_one_device_are_a_pair_only_with_a_new_cann(new_cann: bool) -> None:
    network = FakeNetwork(connects_with_self=new_cann)
    p, d = Process.on("host0/npu0", network), Process.on("host0/npu0", network)
    assert p.ended(p.write(d)) == (DONE if new_cann else FAILED)
    assert p.ended(p.write(p)) == DONE, "a process reaches itself"
    assert not p.device.broken, "only trying tells"


def test_nobody_at_the_address_means_no_batch(p: Process) -> None:
    assert p.engine.batch_transfer_async_write("10.0.0.9:1", [p.block.address], [p.block.address], [64]) == 0


def test_an_older_release_answers_minus_one_there_as_an_unsigned_number() -> None:
    p = Process.on("host0/npu0", FakeNetwork(says_minus_one=True))
    assert p.engine.batch_transfer_async_write("10.0.0.9:1", [p.block.address], [p.block.address], [64]) == MINUS_ONE


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.FAILS])
def test_a_batch_of_one_descriptor_is_freed_by_the_answer_and_asking_again_crashes(
    network: FakeNetwork, p: Process, d: Process, fault: Fault
) -> None:
    network.fault = lambda descriptor: fault
    batch = p.write(d)
    assert p.engine.unfreed == 1
    assert p.ended(batch) == (FAILED if fault is Fault.FAILS else DONE)
    assert p.engine.unfreed == 0
    with pytest.raises(EngineCrashedError):
        p.engine.transfer_check_status(batch)
    assert p.device.broken


@pytest.mark.parametrize("number", [MINUS_ONE, 0])
def test_asking_for_what_is_no_batch_crashes(p: Process, number: int) -> None:
    with pytest.raises(EngineCrashedError):
        p.engine.transfer_check_status(number)


def test_the_first_descriptor_speaks_for_its_batch_which_is_then_never_freed() -> None:
    network = FakeNetwork(by_hand=True)
    p, d = Process.on("host0/npu0", network), Process.on("host0/npu1", network)
    p.block.data.fill_(7)
    here, there = p.block.address, d.block.address
    batch = p.engine.batch_transfer_async_write(d.session, [here, here + 32], [there, there + 32], [32, 32])
    p.engine.run()
    assert p.engine.transfer_check_status(batch) == DONE
    assert d.block.data[:32].eq(7).all() and not d.block.data[32:].eq(7).any()
    p.engine.run()
    assert p.engine.transfer_check_status(batch) == DONE
    assert p.engine.unfreed == 1


def test_tasks_run_in_an_order_that_the_seed_decides() -> None:
    def order(seed: int | None) -> list[int]:
        network = FakeNetwork(by_hand=True, seed=seed)
        p, d = Process.on("host0/npu0", network), Process.on("host0/npu1", network)
        batches = [p.write(d) for _ in range(8)]
        found: list[int] = []
        while batches:
            p.engine.run()
            (ended,) = [batch for batch in batches if p.engine.transfer_check_status(batch) == DONE]
            found.append(ended)
            batches.remove(ended)
        return [sorted(found).index(batch) for batch in found]

    assert order(None) == list(range(8))
    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize(
    ("fault", "first", "landed", "last"),
    [
        (Fault.LATE, PENDING, True, DONE),
        (Fault.TOO_LATE, TOO_LATE, True, DONE),
        (Fault.FAILS_AND_LANDS, FAILED, True, None),
        (Fault.FAILS, FAILED, False, None),
        (Fault.LOST, PENDING, False, PENDING),
    ],
)
def test_a_descriptor_ends_late_or_never_as_it_is_told(
    fault: Fault, first: int, landed: bool, last: int | None
) -> None:
    network = FakeNetwork(by_hand=True, fault=lambda descriptor: fault)
    p, d = Process.on("host0/npu0", network), Process.on("host0/npu1", network)
    p.block.data.fill_(7)
    batch = p.write(d)
    p.engine.run()
    assert p.engine.transfer_check_status(batch) == first
    assert not d.block.data.eq(7).any()
    assert p.engine.land() == landed
    assert d.block.data.eq(7).all() == landed
    if last is not None:
        assert p.engine.transfer_check_status(batch) == last


def test_more_tasks_than_may_wait_fail(network: FakeNetwork, p: Process, d: Process) -> None:
    network.gate.clear()
    batches = [p.write(d) for _ in range(MAX_WAITING + 1)]
    assert p.engine.transfer_check_status(batches[-1]) == FAILED
    network.gate.set()
    assert p.ended(batches[0]) == DONE


@pytest.mark.parametrize("call", ["initialize", "register", "write", "check"])
def test_a_thread_that_has_not_set_the_device_is_refused(p: Process, d: Process, call: str) -> None:
    batch, other = p.write(d), p.device.allocate(64)
    calls = {
        "initialize": lambda: p.engine.initialize("10.0.0.1", "P2PHANDSHAKE", "ascend", "") == 0,
        "register": lambda: p.engine.register_memory(other.address, 64) == 0,
        "write": lambda: p.write(d) != 0,
        "check": lambda: p.engine.transfer_check_status(batch) >= 0,
    }
    succeeded: list[bool] = []
    thread = threading.Thread(target=lambda: succeeded.append(calls[call]()))
    thread.start()
    thread.join()
    assert succeeded == [False]
    assert "not set the device" in p.device.broken[0]


def test_what_ascend_does_not_register(p: Process) -> None:
    crooked, large = p.device.allocate(64, alignment=512), p.device.allocate(2 * NPU_ALIGNMENT)
    assert p.engine.register_memory(large.address, 2 * NPU_ALIGNMENT) == 0
    for address, nbytes, why in (
        (crooked.address, 64, "2 MB"),
        (7 * NPU_ALIGNMENT, 64, "not the device's"),
        (large.address - NPU_ALIGNMENT, 64, "not the device's"),
        (large.address + NPU_ALIGNMENT, 64, "overlaps"),
    ):
        assert p.engine.register_memory(address, nbytes) != 0
        assert why in p.device.broken[-1]


def test_the_257th_region_is_refused(p: Process) -> None:
    p.engine.regions *= MAX_REGIONS
    assert p.engine.register_memory(p.device.allocate(64).address, 64) != 0
    assert str(MAX_REGIONS) in p.device.broken[-1]


def test_memory_that_is_not_registered_is_neither_read_nor_written(p: Process, d: Process) -> None:
    assert p.ended(p.write(d, nbytes=65)) == FAILED
    assert "not registered" in p.device.broken[-1]
    p.engine.regions[0] = (p.block.address, p.block.address + 65)
    assert p.ended(p.write(d, nbytes=65)) == FAILED
    assert "not registered there" in p.device.broken[-1]


def test_a_batch_of_too_many_descriptors_is_not_accepted(p: Process, d: Process) -> None:
    many = MAX_DESCRIPTORS + 1
    sources, targets = [p.block.address] * many, [d.block.address] * many
    assert p.engine.batch_transfer_async_write(d.session, sources, targets, [1] * many) == 0


def test_a_process_has_one_engine_and_no_metadata_server(network: FakeNetwork, p: Process) -> None:
    second = FakeTransferEngine(network, p.device)
    assert second.initialize("10.0.0.1", "P2PHANDSHAKE", "ascend", "") != 0
    assert second.initialize("10.0.0.1", "etcd://10.0.0.1", "ascend", "") != 0
    assert ["second engine" in p.device.broken[0], "metadata" in p.device.broken[1]] == [True, True]
