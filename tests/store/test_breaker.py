"""Calls that never end cost their deadline once, and what they touch is handed back when they do end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from store.breaker import Guard
from store.errors import StoreError, StoreUnavailableError


class Dependency:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.ended: list[str] = []

    def ask(self) -> str:
        assert self.answers.wait(20)
        return "answer"


@pytest.fixture
def dependency() -> Iterator[Dependency]:
    made = Dependency()
    yield made
    made.answers.set()


def guard_of(dependency: Dependency, threads: int = 2, failures_to_open: int = 2) -> Guard:
    return Guard(
        "it", dependency.ask, timeout_s=0.05, threads=threads, failures_to_open=failures_to_open, probe_after_s=0.02
    )


def test_a_call_returns_what_its_function_returns(dependency: Dependency) -> None:
    guard = guard_of(dependency)
    assert guard.call(lambda: 7) == 7
    ended: list[int] = []
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 // 0, on_failure=lambda: ended.append(1))
    assert ended == [1] and guard.state == "up"
    assert guard.close(5)


def test_a_late_call_hands_back_what_it_touches_when_it_ends(dependency: Dependency) -> None:
    guard = guard_of(dependency)
    ended = threading.Event()
    with pytest.raises(StoreUnavailableError):
        guard.call(dependency.ask, on_failure=ended.set)
    assert not ended.is_set() and guard.late_calls == 1
    dependency.answers.set()
    assert ended.wait(5)
    assert guard.call(lambda: "works") == "works"


def test_the_breaker_opens_and_closes_by_itself(dependency: Dependency) -> None:
    guard = guard_of(dependency, threads=4)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            guard.call(dependency.ask)
    assert guard.state == "down" and guard.openings == 1
    ended: list[int] = []
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError) as refused:
        guard.call(lambda: "not called", on_failure=lambda: ended.append(1))
    assert time.monotonic() - started < 0.02 and ended == [1] and refused.value.retry_after_s > 0
    dependency.answers.set()
    assert guard.wait_until_up(5)
    assert guard.call(lambda: "called") == "called"


def test_when_all_threads_are_stuck_calls_fail_at_once(dependency: Dependency) -> None:
    guard = guard_of(dependency, threads=2, failures_to_open=99)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            guard.call(dependency.ask)
    with pytest.raises(StoreUnavailableError, match="stuck"):
        guard.call(lambda: "not called")
    assert not guard.close(0.05), "it does not wait for them"


def test_a_call_that_never_began_is_not_late(dependency: Dependency) -> None:
    guard = guard_of(dependency, threads=1, failures_to_open=99)
    busy = threading.Thread(target=lambda: guard.call(lambda: time.sleep(0.3), timeout_s=5))
    busy.start()
    ended: list[int] = []
    with pytest.raises(StoreUnavailableError):
        guard.call(lambda: ended.append(99), timeout_s=0.05, on_failure=lambda: ended.append(1))
    busy.join(5)
    assert guard.close(5) and ended == [1] and guard.late_calls == 0


def test_our_own_refusals_do_not_open_it(dependency: Dependency) -> None:
    guard = guard_of(dependency)

    def refuse() -> None:
        raise StoreError("full")

    for _ in range(5):
        with pytest.raises(StoreError, match="full"):
            guard.call(refuse)
    assert guard.state == "up"


def test_a_probe_that_fails_in_a_way_nobody_named_is_repeated() -> None:
    """Without its probe an open breaker would stay open for ever."""
    outcomes = [RuntimeError("setup: bad address"), StoreUnavailableError("away")]

    def probe() -> None:
        if outcomes:
            raise outcomes.pop(0)

    guard = Guard("it", probe, timeout_s=0.05, probe_after_s=0.01, is_open=True)
    assert guard.wait_until_up(5) and guard.call(lambda: 7) == 7
    assert guard.close(5)
