"""Calls that never end cost their deadline once, and what they touch is handed back when they do end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from store.errors import StoreError, StoreUnavailableError
from store.mooncake.breaker import Guard
from tests.waiting import PATIENCE_S

SOON_S = 0.02


class Dependency:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.ended: list[str] = []

    def ask(self) -> str:
        assert self.answers.wait(PATIENCE_S)
        return "answer"


@pytest.fixture
def dependency() -> Iterator[Dependency]:
    made = Dependency()
    made.answers.set()
    yield made
    made.answers.set()


def guard_of(dependency: Dependency, threads: int = 2, failures_to_open: int = 2) -> Guard:
    """One that is up, and whose dependency answers no more."""
    guard = Guard(
        "it",
        dependency.ask,
        threads=threads,
        failures_to_open=failures_to_open,
        probe_after_s=0.02,
    )
    assert guard.wait_until_up(PATIENCE_S)
    dependency.answers.clear()
    return guard


def too_late(guard: Guard, dependency: Dependency, on_failure: Callable[[], None] = lambda: None) -> None:
    with pytest.raises(StoreUnavailableError, match="did not answer"):
        guard.call(dependency.ask, timeout_s=SOON_S, on_failure=on_failure)


def test_a_call_returns_what_its_function_returns(dependency: Dependency) -> None:
    guard = guard_of(dependency)
    assert guard.call(lambda: 7, timeout_s=PATIENCE_S) == 7
    ended: list[int] = []
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 // 0, timeout_s=PATIENCE_S, on_failure=lambda: ended.append(1))
    assert ended == [1] and guard.state == "up"
    assert guard.close(PATIENCE_S)


def test_a_late_call_hands_back_what_it_touches_when_it_ends(dependency: Dependency) -> None:
    guard = guard_of(dependency)
    ended = threading.Event()
    too_late(guard, dependency, on_failure=ended.set)
    assert not ended.is_set()
    dependency.answers.set()
    assert ended.wait(PATIENCE_S)
    assert guard.call(lambda: "works", timeout_s=PATIENCE_S) == "works"


def test_the_breaker_opens_and_closes_by_itself(dependency: Dependency) -> None:
    guard = guard_of(dependency, threads=4)
    for _ in range(2):
        too_late(guard, dependency)
    assert guard.state == "down"
    ended: list[int] = []
    with pytest.raises(StoreUnavailableError, match="is down"):
        guard.call(lambda: "not called", timeout_s=PATIENCE_S, on_failure=lambda: ended.append(1))
    assert ended == [1]
    dependency.answers.set()
    assert guard.wait_until_up(PATIENCE_S)
    assert guard.call(lambda: "called", timeout_s=PATIENCE_S) == "called"


def test_when_all_threads_are_stuck_calls_fail_at_once(dependency: Dependency) -> None:
    guard = guard_of(dependency, threads=2, failures_to_open=99)
    for _ in range(2):
        too_late(guard, dependency)
    with pytest.raises(StoreUnavailableError, match="stuck"):
        guard.call(lambda: "not called", timeout_s=PATIENCE_S)
    assert not guard.close(0.05), "it does not wait for them"


def test_a_call_that_never_began_is_not_late(dependency: Dependency) -> None:
    guard = guard_of(dependency, threads=1, failures_to_open=99)
    began = threading.Event()
    busy = threading.Thread(target=lambda: guard.call(lambda: (began.set(), dependency.ask()), timeout_s=PATIENCE_S))
    busy.start()
    assert began.wait(PATIENCE_S)
    ended: list[int] = []
    with pytest.raises(StoreUnavailableError):
        guard.call(lambda: ended.append(99), timeout_s=SOON_S, on_failure=lambda: ended.append(1))
    dependency.answers.set()
    busy.join(PATIENCE_S)
    assert guard.close(PATIENCE_S) and ended == [1]


def test_our_own_refusals_do_not_open_it(dependency: Dependency) -> None:
    guard = guard_of(dependency)

    def refuse() -> None:
        raise StoreError("full")

    for _ in range(5):
        with pytest.raises(StoreError, match="full"):
            guard.call(refuse, timeout_s=PATIENCE_S)
    assert guard.state == "up"


def test_what_is_away_is_asked_at_a_steady_pace_and_what_refuses_less_and_less_often() -> None:
    away, refused = [0.0] * 16, [time.monotonic()]

    def probe() -> None:
        if away:
            away.pop()
            raise StoreUnavailableError("no master")
        refused.append(time.monotonic())
        if len(refused) < 7:
            raise StoreError("registering failed")

    guard = Guard("it", probe, probe_after_s=0.01)
    assert guard.wait_until_up(PATIENCE_S), "sixteen pauses that double would take longer"
    assert guard.close(PATIENCE_S)
    assert refused[-1] - refused[-2] >= 0.01 * 2**5


def test_a_probe_that_fails_in_a_way_nobody_named_is_repeated() -> None:
    """Without its probe an open breaker would stay open for ever."""
    outcomes = [RuntimeError("setup: bad address"), StoreUnavailableError("away")]

    def probe() -> None:
        if outcomes:
            raise outcomes.pop(0)

    guard = Guard("it", probe, probe_after_s=0.01)
    assert guard.wait_until_up(PATIENCE_S) and guard.call(lambda: 7, timeout_s=PATIENCE_S) == 7
    assert guard.close(PATIENCE_S)
