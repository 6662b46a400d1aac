"""What is asked of vLLM's versions. vLLM is a stub here: classes whose source has what one or the other version has."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from epd_serve.engine import compat
from epd_serve.errors import ConfigError


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **content: type) -> None:
    """A module of vLLM's, with packages around it."""
    module = ModuleType(name)
    module.__dict__.update(content)
    parts = name.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    monkeypatch.setitem(sys.modules, name, module)


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
    stub(monkeypatch, "vllm.v1.core.sched.scheduler", Scheduler=scheduler)
    config = SimpleNamespace(max_concurrent_batches=batches)
    assert compat.steps_in_flight_at_reuse(config) == steps  # type: ignore[arg-type]


class CutsBeforeItems:
    def schedule(self) -> None:
        """self.ec_connector.ensure_cache_available(…), self._try_schedule_encoder_inputs(…)"""

    def _try_schedule_encoder_inputs(self, request: str, num_computed_tokens: int, num_new_tokens: int) -> None: ...


class CutsOtherwise(CutsBeforeItems):
    def _try_schedule_encoder_inputs(self, request: str, window: tuple[int, int]) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("scheduler", "known"), [(CutsBeforeItems, True), (CutsOtherwise, False), (KeepsBlocks, False)]
)
def test_a_prefill_stops_before_an_item_where_vllm_is_known_to_be_able_to(
    scheduler: type, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, "vllm.v1.core.sched.scheduler", Scheduler=scheduler)
    assert compat.cuts_before_items() is known


class InEngine:
    pass


class Outside:
    pass


@pytest.mark.parametrize("chosen", [InEngine, Outside])
def test_whether_the_worker_shares_the_engines_process_is_what_vllm_chose(
    chosen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(
        monkeypatch,
        "vllm.v1.executor.abstract",
        Executor=type("Executor", (), {"get_class": staticmethod(lambda config: chosen)}),
    )
    stub(monkeypatch, "vllm.v1.executor.uniproc_executor", UniProcExecutor=InEngine)
    assert compat.worker_in_engine(SimpleNamespace()) is (chosen is InEngine)  # type: ignore[arg-type]


class Renames:
    def _process_mm_uuids(self) -> None:
        """overriding even user-provided ones"""


class Keeps:
    def _process_mm_uuids(self) -> None:
        """preserve explicit UUIDs"""


def renderer(monkeypatch: pytest.MonkeyPatch, base: type) -> None:
    stub(monkeypatch, "vllm.renderers.base", BaseRenderer=base)


def caches(processed_gb: float, *, prefixes: bool) -> SimpleNamespace:
    multimodal = SimpleNamespace(mm_processor_cache_gb=processed_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )


def test_a_vllm_that_renames_items_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer(monkeypatch, Renames)
    with pytest.raises(ConfigError, match="remove --mm-processor-cache-gb") as refused:
        compat.check_item_names(caches(0, prefixes=False))  # type: ignore[arg-type]
    assert refused.value.param == "--mm-processor-cache-gb"


@pytest.mark.parametrize(
    ("base", "processed_gb", "prefixes"), [(Keeps, 0, False), (Renames, 4, False), (Renames, 0, True)]
)
def test_items_that_keep_their_names_are_not(
    base: type, processed_gb: float, prefixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer(monkeypatch, base)
    compat.check_item_names(caches(processed_gb, prefixes=prefixes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "found"), [({"shutdown_timeout": 0}, compat.FINISH_S), ({"shutdown_timeout": 2}, 2), ({}, None)]
)
def test_a_stage_that_ends_finishes_what_it_has_where_vllm_can_and_nobody_says_otherwise(
    given: dict[str, int], found: int | None
) -> None:
    arguments = SimpleNamespace(**given)
    compat.finish_requests_at_end(arguments)
    assert getattr(arguments, "shutdown_timeout", None) == found


@pytest.mark.parametrize(("content", "seed"), [({}, "0"), ({"DEFAULT_NONE_HASH_SEED": str}, None)])
def test_blocks_get_a_seed_where_vllm_would_draw_one(
    content: dict[str, type], seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, "vllm.v1.core.kv_cache_utils", **content)
    sys.modules["vllm.v1.core"].kv_cache_utils = sys.modules["vllm.v1.core.kv_cache_utils"]  # type: ignore[attr-defined]
    monkeypatch.setenv("PYTHONHASHSEED", "")  # restored at the end, whatever is set meanwhile
    monkeypatch.delenv("PYTHONHASHSEED")
    compat.name_blocks_alike()
    assert os.environ.get("PYTHONHASHSEED") == seed
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    compat.name_blocks_alike()
    assert os.environ["PYTHONHASHSEED"] == "7", "an operator's own"
