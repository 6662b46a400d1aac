"""What is asked of vLLM's versions. vLLM is a stub here: classes whose source has what one or the other version has."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from epd_serve.engine import compat
from epd_serve.errors import ConfigError


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


def test_tensor_parallelism_is_the_only_one_that_kv_transfers_know() -> None:
    older = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1)
    compat.check_parallelism(SimpleNamespace(parallel_config=older))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pipeline", "data", "decode_context", "prefill_context"])
def test_other_parallelism_is_refused_before_anything_is_bound(kind: str) -> None:
    parallel = SimpleNamespace(**{f"{kind}_parallel_size": 2})
    with pytest.raises(ConfigError, match="-parallel-size is 2; KV transfers know tensor parallelism only") as refused:
        compat.check_parallelism(SimpleNamespace(parallel_config=parallel))  # type: ignore[arg-type]
    assert refused.value.param == f"--{kind.replace('_', '-')}-parallel-size"
