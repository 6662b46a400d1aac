"""Waiting on conditions. One patience for all tests: only what is broken meets it, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0
_SHORTEST_S, _LONGEST_S = 2e-4, 5e-3  # between two looks: short waits are many, long ones must not keep others waiting


def wait_for(condition: Callable[[], Any], deadline_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails at the deadline.

    It is asked once more afterwards: what came while the process did not run was not late.
    """
    end, pause, look_s = time.monotonic() + deadline_s, threading.Event(), _SHORTEST_S
    while True:
        late = time.monotonic() >= end
        if value := condition():
            return value
        assert not late, "condition not met in time"
        pause.wait(look_s)
        look_s = min(1.5 * look_s, _LONGEST_S)
