"""Every thread that a guard makes begins as it was told: an NPU has to be set in each thread that touches it."""

from __future__ import annotations

import threading

from store.breaker import Guard


def test_calls_and_probes_run_in_threads_that_have_begun() -> None:
    begun, seen = threading.local(), []

    def begin() -> None:
        begun.yes = True

    def look() -> None:
        seen.append(getattr(begun, "yes", False))

    guard = Guard("tier", look, timeout_s=5.0, is_open=True, begin_thread=begin)
    assert guard.wait_until_up(5.0)
    guard.call(look)
    assert guard.close(5.0)
    assert seen == [True, True]
