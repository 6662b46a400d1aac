"""Every thread that a guard makes begins as it was told: an NPU has to be set in each thread that touches it."""

from __future__ import annotations

import threading

from store.mooncake.breaker import Guard
from tests.waiting import PATIENCE_S


def test_calls_and_probes_run_in_threads_that_have_begun() -> None:
    begun, seen = threading.local(), []

    def begin() -> None:
        begun.yes = True

    def look() -> None:
        seen.append(getattr(begun, "yes", False))

    guard = Guard("tier", look, timeout_s=PATIENCE_S, is_open=True, begin_thread=begin)
    assert guard.wait_until_up(PATIENCE_S)
    guard.call(look)
    assert guard.close(PATIENCE_S)
    assert seen == [True, True]
