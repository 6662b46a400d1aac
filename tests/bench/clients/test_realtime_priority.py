"""Unit tests of the generator's priority: taken where it may be, left where it may not, and given back."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from bench.clients.sender import realtime_priority


def _policy() -> int:
    return os.sched_getscheduler(0)


def test_its_thread_goes_first_with_those_that_it_starts_and_no_longer_than_the_run() -> None:
    seen: list[int] = []
    with realtime_priority() as does:
        other = threading.Thread(target=lambda: seen.append(_policy()))
        other.start()
        other.join()
        seen.append(_policy())
    assert seen == [os.SCHED_RR if does else os.SCHED_OTHER] * 2
    assert _policy() == os.SCHED_OTHER


def test_what_fails_meanwhile_leaves_it_as_it_was() -> None:
    with pytest.raises(RuntimeError, match="of the run"), realtime_priority():
        raise RuntimeError("of the run")
    assert _policy() == os.SCHED_OTHER


def test_who_may_not_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with realtime_priority() as does:
        assert not does
