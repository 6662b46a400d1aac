"""When a worker's capture gate is closed, and that nobody waits at it for ever. vLLM's worker is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from epd_serve.engine.capture_gate import CaptureGate, capture_gate
from epd_serve.engine.worker_start import keep_threads_off_captures


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    yield
    capture_gate.open()


class Worker:
    """Notes whether the gate is open where it captures. `fails`: there."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.saw: list[bool] = []

    def compile_or_warm_up_model(self) -> str:
        self.saw.append(capture_gate.passed())
        if self.fails:
            raise RuntimeError("no memory for graphs")
        return "times"


class Wrapper:
    """As vLLM's: it asks its worker for what it lacks."""

    rpc_rank = 0

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def init_device(self) -> None:
        self.worker.saw.append(capture_gate.passed())

    def __getattr__(self, name: str) -> object:
        return getattr(self.worker, name)


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    fresh = type("WorkerWrapperBase", (Wrapper,), {})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", SimpleNamespace(WorkerWrapperBase=fresh))
    keep_threads_off_captures()
    keep_threads_off_captures()  # vLLM may load a plugin twice
    return fresh


def test_it_is_closed_from_the_device_to_the_graphs(wrapper: type[Wrapper]) -> None:
    one = wrapper(Worker(fails=False))
    assert capture_gate.passed(), "a process without a worker never closes it"
    one.init_device()
    assert not capture_gate.passed(), "the KV cache is registered with us here"
    assert one.compile_or_warm_up_model() == "times"
    assert capture_gate.passed()
    assert one.worker.saw == [False, False]


def test_a_capture_that_fails_opens_it(wrapper: type[Wrapper]) -> None:
    one = wrapper(Worker(fails=True))
    one.init_device()
    with pytest.raises(RuntimeError, match="no memory for graphs"):
        one.compile_or_warm_up_model()
    assert capture_gate.passed()


def test_a_vllm_that_never_warms_up_keeps_nobody_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    gate = CaptureGate(deadline_s=0.05)
    gate.close()
    assert not gate.passed()
    assert gate.passed(0.1), "it opens by itself"
    assert "vLLM has not warmed its model up within 0.05 s" in caplog.text
