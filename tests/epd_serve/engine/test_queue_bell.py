"""vLLM's queues between EngineCore and workers wait on a bell, both ends of every one, and lose no message by it."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine import queue_bell
from epd_serve.engine.queue_bell import BellCondition
from tests.waiting import PATIENCE_S, wait_for

MESSAGES = 400


def conditions(tmp_path: Path) -> tuple[BellCondition, BellCondition]:
    address = f"ipc://{tmp_path}/queue"
    return tuple(BellCondition(is_reader=reads, context=None, notify_address=address) for reads in (False, True))  # type: ignore[return-value]


def test_a_message_between_the_look_and_the_wait_is_heard(tmp_path: Path) -> None:
    writer, reader = conditions(tmp_path)
    writer.notify()
    began = time.monotonic()
    reader.wait(timeout_ms=None)
    assert time.monotonic() < began + PATIENCE_S / 2


def test_a_reader_is_woken_to_shut_down(tmp_path: Path) -> None:
    _, reader = conditions(tmp_path)
    reader.cancel()
    began = time.monotonic()
    reader.wait(timeout_ms=None)
    assert time.monotonic() < began + PATIENCE_S / 2


def test_the_file_goes_with_the_writer(tmp_path: Path) -> None:
    writer, reader = conditions(tmp_path)
    del reader
    assert (tmp_path / "queue").exists()
    del writer
    assert not (tmp_path / "queue").exists()


def stand_in(**condition: Any) -> SimpleNamespace:
    return SimpleNamespace(SpinCondition=type("SpinCondition", (), condition))


def installed_in(module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> bool:
    package = "vllm.distributed.device_communicators"
    parent = ModuleType(package)
    parent.shm_broadcast = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, parent)
    queue_bell.wait_asleep()
    return getattr(module, "SpinCondition", None) is BellCondition


def test_a_vllm_that_waits_otherwise_is_left_as_it_is_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def constructor(self: Any, is_reader: bool, context: Any, notify_address: str, busy_loop_s: float = 1) -> None:
        """As 0.23's and 0.32's."""

    def method(self: Any) -> None:
        """One of them."""

    known = {"__init__": constructor, **dict.fromkeys(("record_read", "cancel", "wait", "notify"), method)}
    assert installed_in(stand_in(**known), monkeypatch)
    assert not caplog.records
    assert not installed_in(stand_in(**known, park=method), monkeypatch)
    assert not installed_in(SimpleNamespace(), monkeypatch)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def echo(handle: Any, pipe: Connection) -> None:
    """A worker: answers each message, and says how many it got."""
    queue_bell.wait_asleep()
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    requests, answers = MessageQueue.create_from_handle(handle, 0), MessageQueue(1, 1, max_chunk_bytes=1 << 16)
    pipe.send(answers.export_handle())
    requests.wait_until_ready()
    answers.wait_until_ready()
    while (message := requests.dequeue(indefinite=True)) is not None:
        answers.enqueue(message)


@pytest.mark.slow
def test_vllms_own_queues_lose_no_message_and_wait_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages within a millisecond are what vLLM's own notifications lose one of."""
    shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")
    monkeypatch.setattr(shm_broadcast, "SpinCondition", shm_broadcast.SpinCondition)  # put back afterwards
    queue_bell.wait_asleep()
    here, there = multiprocessing.get_context("spawn").Pipe()
    requests = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=1 << 16)
    worker = multiprocessing.get_context("spawn").Process(target=echo, args=(requests.export_handle(), there))
    worker.start()
    try:
        wait_for(here.poll, timeout_s=60)
        answers = shm_broadcast.MessageQueue.create_from_handle(here.recv(), 0)
        assert type(answers._spin_condition) is type(requests._spin_condition) is BellCondition
        requests.wait_until_ready()
        answers.wait_until_ready()
        for number in range(0, MESSAGES, 2):
            requests.enqueue(number)
            requests.enqueue(number + 1)
            assert [answers.dequeue(timeout=PATIENCE_S) for _ in range(2)] == [number, number + 1]
        spent = time.process_time()
        with pytest.raises(TimeoutError):
            answers.dequeue(timeout=0.5)
        assert time.process_time() - spent < 0.05
        requests.enqueue(None)
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
    finally:
        worker.kill()
