"""What is asked of vLLM's versions. vLLM is a stub here: classes whose source has what one or the other version has."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from epd_serve.engine import compat


class KeepsBlocks:
    def __init__(self) -> None:
        self.defer_block_free = False


class FreesBlocks:
    def __init__(self) -> None:
        self.waiting: list[str] = []


@pytest.mark.parametrize(
    ("scheduler", "batches", "steps"),
    [(KeepsBlocks, 2, 0), (FreesBlocks, 1, 0), (FreesBlocks, 2, 1), (FreesBlocks, 4, 3)],
)
def test_steps_in_flight_matter_where_vllm_does_not_wait_for_them(
    scheduler: type, batches: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("vllm.v1.core.sched.scheduler")
    module.Scheduler = scheduler  # type: ignore[attr-defined]
    parts = module.__name__.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = SimpleNamespace(max_concurrent_batches=batches)
    assert compat.steps_in_flight_at_reuse(config) == steps  # type: ignore[arg-type]
