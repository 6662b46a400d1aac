"""The fake device is as strict as the hardware: work is late, and each rule, broken, is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.fake_npu.device import FakeDevice, RuleBrokenError
from tests.waiting import PATIENCE_S, wait_for

ONES = torch.ones(64, dtype=torch.uint8)
CALLS = ["allocate", "copy", "fence", "wait", "to_host", "run"]
CALLS += ["timed_fence", "wait for a timed fence", "download", "upload"]


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


@pytest.mark.parametrize("call", CALLS)
def test_a_thread_that_has_not_set_the_device_is_refused(device: FakeDevice, call: str) -> None:
    block, host, wait, timed = (
        device.allocate(64),
        torch.zeros(64, dtype=torch.uint8),
        device.fence(),
        device.timed_fence(),
    )
    calls = {
        "allocate": lambda: device.allocate(64),
        "copy": lambda: device.copy(block.data, ONES),
        "fence": device.fence,
        "wait": wait,
        "to_host": lambda: device.to_host(block.data),
        "run": lambda: device.run(lambda: None),
        "timed_fence": device.timed_fence,
        "wait for a timed fence": timed.wait,
        "download": lambda: device.download(host, block.data),
        "upload": lambda: device.upload(block.data, host),
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


def test_while_a_graph_is_captured_only_the_thread_that_captures_may_act(device: FakeDevice) -> None:
    raised: list[BaseException] = []

    def other() -> None:
        try:
            device.enter_thread()
        except RuleBrokenError as error:
            raised.append(error)

    with device.capturing():
        device.allocate(64)
        thread = threading.Thread(target=other, name="other")
        thread.start()
        thread.join()
    assert device.broken == ["enter_thread in thread other, while another captures a graph"]
    assert raised
    device.enter_thread()


def test_an_upload_reads_the_host_when_its_stream_gets_there(device: FakeDevice) -> None:
    block, gate, host = device.allocate(64), threading.Event(), ONES.clone()
    device.run(gate.wait)
    device.upload(block.data, host)
    host.fill_(2)  # too early: nobody waited for a fence
    gate.set()
    device.fence()()
    assert block.data[0] == 2


def test_a_copy_from_the_host_reads_it_at_the_call(device: FakeDevice) -> None:
    block, gate, host = device.allocate(64), threading.Event(), ONES.clone()
    device.run(gate.wait)
    device.copy(block.data, host)
    host.fill_(2)
    gate.set()
    device.fence()()
    assert block.data[0] == 1


def test_a_download_is_done_on_return_and_follows_what_its_stream_has_queued(device: FakeDevice) -> None:
    block, host = device.allocate(64), torch.zeros(64, dtype=torch.uint8)
    device.latency_s = 0.01
    device.run(lambda: block.data.copy_(ONES))
    device.download(host, block.data)
    assert torch.equal(host, ONES)


def test_a_download_does_not_see_what_another_stream_has_queued(device: FakeDevice) -> None:
    block, gate, host = device.allocate(64), threading.Event(), torch.zeros(64, dtype=torch.uint8)
    device.run(gate.wait)
    device.run(lambda: block.data.copy_(ONES))
    in_a_thread(device, lambda: device.download(host, block.data))
    gate.set()
    assert host[0] != 1


def test_copies_take_the_time_of_their_bytes(device: FakeDevice) -> None:
    block = device.allocate(64)
    device.bytes_per_s = 64 / 0.02
    first = device.timed_fence()
    device.upload(block.data, ONES)
    second = device.timed_fence()
    assert second.seconds_since(first) is None
    second.wait()
    assert (second.seconds_since(first) or 0) >= 0.02


def test_a_thread_is_seen_waiting_until_its_fence_is_reached(device: FakeDevice) -> None:
    gate = threading.Event()
    device.run(gate.wait)
    wait, passed = device.fence(), threading.Event()
    thread = threading.Thread(target=lambda: in_a_thread(device, lambda: (wait(), passed.set())))
    thread.start()
    wait_for(device.waited_for)
    assert not passed.is_set()
    gate.set()
    thread.join()
    assert passed.is_set() and not device.waited_for()


def test_memory_on_the_wrong_side_is_refused(device: FakeDevice) -> None:
    mine, host = device.allocate(64), torch.zeros(64, dtype=torch.uint8)
    for wrong in (
        lambda: device.download(mine.data, host),
        lambda: device.download(mine.data, mine.data),
        lambda: device.upload(host, mine.data),
        lambda: device.upload(mine.data, mine.data),
        lambda: device.copy(host, mine.data),
        lambda: device.download(host, mine.data.as_strided((2, 32), (64, 1))),
    ):
        before = len(device.broken)
        with pytest.raises(RuleBrokenError, match="memory"):
            wrong()
        assert len(device.broken) == before + 1


def test_an_operation_that_fails_is_noted_and_does_not_end_its_stream(device: FakeDevice) -> None:
    device.run(lambda: 1 / 0)
    device.fence()()
    assert device.broken == ["a queued operation failed: division by zero"]


def test_a_stream_ends_with_the_thread_that_owned_it(device: FakeDevice) -> None:
    before = streams()
    in_a_thread(device, lambda: device.run(lambda: None))
    for thread in streams() - before:
        thread.join(PATIENCE_S)
    assert streams() <= before


def streams() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "fake-stream"}


def in_a_thread(device: FakeDevice, call: Callable[[], object]) -> None:
    """Call it from another thread that has entered, and wait for that."""

    def run() -> None:
        device.enter_thread()
        call()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
