"""What is asked of vLLM's versions. vLLM is a stub here: classes whose source has what one or the other version has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

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


class Old:
    """self.defer_block_free = False, self.ec_connector.request_finished(…): words are no code."""

    def __init__(self) -> None:
        self.waiting: list[str] = []  # not defer_block_free


class New:
    ec_connector: Any

    def __init__(self) -> None:
        self.defer_block_free = False

    def _free_request(self, request: str) -> None:
        self.ec_connector.request_finished(request)


class InFront(New):
    """As vllm-ascend has one: it takes the place of vLLM's class under vLLM's name."""

    def __init__(self) -> None:
        super().__init__()


ITEMS = "vllm.distributed.ec_transfer.ec_connector.utils"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a vLLM of this version, with this scheduler, and with or without items as metadata."""

    def make(version: str, scheduler: type = Old, *, metadata: bool = False) -> None:
        stub(monkeypatch, "vllm.v1.core.sched.scheduler", Scheduler=scheduler)
        monkeypatch.setitem(sys.modules, ITEMS, None)
        if metadata:
            stub(monkeypatch, ITEMS, collect_ec_item_metadata=dict)
        monkeypatch.setattr(sys.modules["vllm"], "__version__", version, raising=False)
        compat.release.cache_clear()

    yield make
    compat.release.cache_clear()


def steps_of(batches: int) -> int:
    return compat.steps_in_flight_at_reuse(SimpleNamespace(max_concurrent_batches=batches))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "scheduler", "metadata", "batches", "steps"),
    [
        ("0.23.0", Old, False, 1, 0),
        ("0.23.0.post1", Old, False, 2, 1),
        ("0.23.0", Old, False, 4, 3),
        ("0.26.0rc1", InFront, False, 2, 0),
        ("0.32.0", New, True, 2, 0),
    ],
)
def test_steps_in_flight_matter_where_vllm_does_not_wait_for_them(
    version: str, scheduler: type, metadata: bool, batches: int, steps: int, installed: Callable[..., None]
) -> None:
    installed(version, scheduler, metadata=metadata)
    assert steps_of(batches) == steps


@pytest.mark.parametrize(
    ("version", "scheduler", "metadata", "odd"),
    [
        ("0.32.0", Old, True, "keeps_blocks_in_flight, tells_finished_requests"),
        ("0.32.1", New, False, "takes_items_as_metadata"),
        ("0.23.0", New, False, "keeps_blocks_in_flight, tells_finished_requests"),
    ],
)
def test_a_vllm_that_is_not_as_it_was_released_is_refused(
    version: str, scheduler: type, metadata: bool, odd: str, installed: Callable[..., None]
) -> None:
    installed(version, scheduler, metadata=metadata)
    with pytest.raises(ConfigError, match=rf"vLLM {version} is not as it was released \({odd}\)"):
        compat.release()


@pytest.mark.parametrize(
    ("version", "scheduler", "steps"),
    [("0.33.0", Old, 1), ("0.33.0", New, 0), ("0.25.1", New, 1), ("0.22.0", New, 1), ("dev", New, 1)],
)
def test_of_a_vllm_that_was_not_read_only_what_its_code_confirms_is_believed(
    version: str, scheduler: type, steps: int, installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(version, scheduler, metadata=True)
    assert steps_of(2) == steps
    assert compat.tells_finished_requests() is (version == "0.33.0" and scheduler is New)
    assert f"vLLM {version} was not read" in caplog.text


class CutsBeforeItems:
    ec_connector: Any

    def schedule(self) -> None:
        if self.ec_connector.ensure_cache_available("request"):
            self._try_schedule_encoder_inputs("request", 0, 1)

    def _try_schedule_encoder_inputs(self, request: str, num_computed_tokens: int, num_new_tokens: int) -> None: ...


class Balances(CutsBeforeItems):
    """As vllm-ascend has one: vLLM's own `schedule` runs behind it."""

    def schedule(self) -> None:
        super().schedule()


class OnlySaysSo:
    def schedule(self) -> None:
        """self.ec_connector.ensure_cache_available(…), self._try_schedule_encoder_inputs(…)"""

    def _try_schedule_encoder_inputs(self, request: str, num_computed_tokens: int, num_new_tokens: int) -> None: ...


class CutsOtherwise(CutsBeforeItems):
    def _try_schedule_encoder_inputs(self, request: str, window: tuple[int, int]) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("scheduler", "known"),
    [(CutsBeforeItems, True), (Balances, True), (OnlySaysSo, False), (CutsOtherwise, False), (New, False)],
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


def caches(processed_gb: float, *, prefixes: bool) -> SimpleNamespace:
    multimodal = SimpleNamespace(mm_processor_cache_gb=processed_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )


def test_a_vllm_that_renames_items_is_refused(installed: Callable[..., None]) -> None:
    installed("0.28.0", New)
    with pytest.raises(ConfigError, match="remove --mm-processor-cache-gb") as refused:
        compat.check_item_names(caches(0, prefixes=False))  # type: ignore[arg-type]
    assert refused.value.param == "--mm-processor-cache-gb"


@pytest.mark.parametrize(
    ("version", "scheduler", "metadata", "processed_gb", "prefixes"),
    [("0.32.0", New, True, 0, False), ("0.23.0", Old, False, 4, False), ("0.23.0", Old, False, 0, True)],
)
def test_items_that_keep_their_names_are_not(
    version: str,
    scheduler: type,
    metadata: bool,
    processed_gb: float,
    prefixes: bool,
    installed: Callable[..., None],
) -> None:
    installed(version, scheduler, metadata=metadata)
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
