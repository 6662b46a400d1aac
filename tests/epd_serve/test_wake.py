"""What an idle scheduler sleeps on: who waits in the same step hears the same ring."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from epd_serve import wake
from epd_serve.wake import IdleWaiter
from tests.waiting import PATIENCE_S


@pytest.fixture
def waiter(monkeypatch: pytest.MonkeyPatch) -> IdleWaiter:
    """One whose waiters return by a ring alone."""
    monkeypatch.setattr(wake, "_IDLE_WAIT_S", 10 * PATIENCE_S)
    return IdleWaiter()


def returns(wait: Callable[[], None]) -> bool:
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def test_one_ring_wakes_everyone_who_waits_after_it(waiter: IdleWaiter) -> None:
    features, kv = waiter.sleeper(), waiter.sleeper()
    waiter.wake()
    assert returns(features)
    assert returns(kv), "the first waiter of the step has taken the second one's ring"


def test_one_ring_wakes_everyone_who_waits_already(waiter: IdleWaiter) -> None:
    threads = [threading.Thread(target=waiter.sleeper(), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiter.wake()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def test_a_ring_is_heard_once_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    waiter = IdleWaiter()
    wait, naps = waiter.sleeper(), []
    monkeypatch.setattr(waiter._changed, "wait_for", lambda rung, nap_s: naps.append(rung()))
    waiter.wake()
    waiter.wake()
    wait()
    wait()
    assert naps == [True, False], "what was heard keeps nobody from sleeping"
