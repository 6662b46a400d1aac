"""EngineCore sleeps after a step that computed nothing where our connectors wait, and where nothing else does."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from types import SimpleNamespace

import pytest

from epd_serve.engine import idle_steps
from epd_serve.wake import IdleWaiter
from tests.waiting import PATIENCE_S, wait_for


class Engine:
    """vLLM's `EngineCoreProc` as far as the hook looks at it. `waits`: a connector of ours said so in the step."""

    def __init__(self, waiter: IdleWaiter, *, waits: bool = True, executed: bool = False) -> None:
        self.waiter, self.waits, self.executed = waiter, waits, executed
        self.input_queue: queue.Queue[str] = queue.Queue()
        self.batch_queue: deque[tuple[object, ...]] | None = None
        self.scheduler = SimpleNamespace(running=[], requests={}, finished_req_ids=set())

    def _process_engine_step(self) -> bool:
        if self.waits:
            self.waiter.expect_wake()
        return self.executed


@pytest.fixture
def waiter(monkeypatch: pytest.MonkeyPatch) -> IdleWaiter:
    """Sleeps of it end by a ring alone; what it slept is in `slept`."""
    waiter = IdleWaiter()
    monkeypatch.setattr(idle_steps, "idle_waiter", waiter)
    monkeypatch.setattr(idle_steps, "_LONGEST_S", 10 * PATIENCE_S)
    kind = type("EngineCoreProc", (Engine,), {"_process_engine_step": Engine._process_engine_step})
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCoreProc=kind))  # type: ignore[arg-type]
    idle_steps.sleep_between_idle_steps()
    idle_steps.sleep_between_idle_steps()  # a plugin may be loaded twice
    monkeypatch.setattr(Engine, "kind", kind, raising=False)
    return waiter


def step(engine: Engine) -> bool:
    """Takes a step in a thread; whether it came back before anybody rang."""
    thread = threading.Thread(target=engine._process_engine_step, daemon=True)
    thread.start()
    thread.join(0.2)
    asleep = thread.is_alive()
    engine.waiter.wake()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "a ring did not wake it"
    return not asleep


def made(waiter: IdleWaiter, **how: bool) -> Engine:
    engine: Engine = Engine.kind(waiter, **how)  # type: ignore[attr-defined]
    return engine


def in_flight(tokens: int) -> deque[tuple[object, ...]]:
    """A batch of so many tokens, as EngineCore keeps it under asynchronous scheduling."""
    return deque([(None, SimpleNamespace(total_num_scheduled_tokens=tokens), None)])


def test_it_sleeps_until_somebody_rings(waiter: IdleWaiter) -> None:
    assert not step(made(waiter))


def test_an_arrival_wakes_it(waiter: IdleWaiter) -> None:
    engine = made(waiter)
    thread = threading.Thread(target=engine._process_engine_step, daemon=True)
    thread.start()
    wait_for(lambda: hasattr(engine.input_queue, idle_steps._RINGS))
    engine.input_queue.put_nowait("a request")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert engine.input_queue.get_nowait() == "a request"


@pytest.mark.parametrize("how", [{"waits": False}, {"executed": True}])
def test_it_does_not_sleep_when_nobody_of_ours_waits_or_something_was_computed(
    waiter: IdleWaiter, how: dict[str, bool]
) -> None:
    assert step(made(waiter, **how))


def test_it_does_not_sleep_over_what_is_running_over_arrived_in_flight_or_compiled(waiter: IdleWaiter) -> None:
    engines = [made(waiter) for _ in range(5)]
    engines[0].scheduler.running.append("a request")
    engines[1].input_queue.put_nowait("a request")
    engines[2].batch_queue = in_flight(7)
    engines[3].scheduler.requests["a"] = SimpleNamespace(
        status=SimpleNamespace(name="WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")
    )
    engines[4].scheduler.finished_req_ids.add("a")
    assert all(map(step, engines))


def test_it_sleeps_over_a_request_that_runs_and_has_come_to_a_feature_it_waits_for(waiter: IdleWaiter) -> None:
    engine = made(waiter)
    engine.scheduler.running.append("a request")
    engine.scheduler.awaits_feature = lambda request: request == "a request"
    assert not step(engine)
    engine.scheduler.running.append("another")
    assert step(engine)


def test_under_asynchronous_scheduling_it_sleeps_when_the_idle_step_before_has_been_looked_at(
    waiter: IdleWaiter,
) -> None:
    engine = made(waiter)
    engine.batch_queue = in_flight(0)
    assert step(engine)
    waiter.wait(0)  # that `step` rang
    assert not step(engine)  # and was woken
    assert step(engine), "what the workers said in the step after that is in flight now"


def test_what_changed_during_the_step_keeps_it_awake(waiter: IdleWaiter) -> None:
    waiter.wake()
    assert step(made(waiter))
