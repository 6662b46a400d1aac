"""Our KV connector against both generations of vLLM's hooks. vLLM is a stub here, real in tests/e2e."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine.kv.prefill_scheduler import PrefillStep
from epd_serve.engine.support import check_kv_groups
from epd_serve.errors import ConfigError

# vllm 0.23.0, distributed/kv_transfer/kv_connector/v1/base.py: every public method that a subclass may define.
HOOKS_OF_0_23 = {
    *("bind_connector_metadata", "clear_connector_metadata", "has_connector_metadata", "register_kv_caches"),
    *("register_cross_layers_kv_cache", "set_host_xfer_buffer_ops", "handle_preemptions", "start_load_kv"),
    *("wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished", "get_block_ids_with_load_errors"),
    *("shutdown", "get_kv_connector_stats", "get_kv_connector_kv_cache_events", "get_handshake_metadata"),
    *("build_connector_worker_meta", "bind_gpu_block_pool", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *("build_connector_meta", "on_new_request", "update_connector_output", "request_finished", "take_events"),
    *("get_required_kvcache_layout", "requires_piecewise_for_cudagraph", "get_finished_count"),
    *("build_kv_connector_stats", "set_xfer_handshake_metadata", "build_prom_metrics", "reset_cache"),
}


class Base:
    """What our connector uses of vLLM's `KVConnectorBase_V1`."""

    def __init__(self, *_: Any) -> None: ...

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    base = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    role = enum.Enum("KVConnectorRole", ["SCHEDULER", "WORKER"])
    metadata = type("KVConnectorMetadata", (), {})
    base.__dict__.update(KVConnectorBase_V1=Base, KVConnectorMetadata=metadata, KVConnectorRole=role)
    parts = base.__name__.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "epd_serve.engine.kv.connector", raising=False)
    yield importlib.import_module("epd_serve.engine.kv.connector")
    sys.modules.pop("epd_serve.engine.kv.connector")


class PlayedWorker:
    """P's worker: remembers what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def fence(self, step: PrefillStep) -> None:
        self.told.append(f"fence {step.preempted}")

    def begin_step(self, step: PrefillStep) -> None:
        self.told.append("begin")


def worker_side(module: Any, worker: PlayedWorker | None) -> Any:
    connector = object.__new__(module.GroupedKVConnector)
    connector._prefill_worker, connector._decode_worker = worker, None
    return connector


def test_every_hook_is_one_of_the_older_generation(module: Any) -> None:
    defined = {name for name in vars(module.GroupedKVConnector) if not name.startswith("_")}
    assert defined <= HOOKS_OF_0_23
    assert "handle_preemptions" in defined


def test_preempted_requests_are_fenced_before_the_step_begins(module: Any) -> None:
    worker = PlayedWorker()
    connector = worker_side(module, worker)
    metadata = module.TransferMetadata(prefill=PrefillStep(preempted=["r"]))
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    assert worker.told == ["fence ['r']", "begin"]


def test_decode_has_nothing_to_fence(module: Any) -> None:
    connector = worker_side(module, None)
    connector.handle_preemptions(module.TransferMetadata())


BASES = {
    "MLAAttentionSpec": "FullAttentionSpec",
    "AscendMLAAttentionSpec": "MLAAttentionSpec",  # vllm-ascend's, of every MLA layer
    "HiddenStateCacheSpec": "MLAAttentionSpec",
    "RSWASpec": "FullAttentionSpec",
    "SinkFullAttentionSpec": "FullAttentionSpec",
}


def spec_of(kind: str, **attributes: Any) -> Any:
    return type(kind, (type(spec_of(BASES[kind])),) if kind in BASES else (), attributes)()


def group(kind: str, **layers: str) -> Any:
    """A KV group of vLLM's: its spec is of this class, or of the layers' where they differ in size."""
    more = {"kv_cache_specs": {name: spec_of(of) for name, of in layers.items()}} if layers else {}
    return SimpleNamespace(kv_cache_spec=spec_of(kind, **more))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([group("FullAttentionSpec"), group("SlidingWindowSpec")], "2 KV groups of FullAttentionSpec, SlidingWindow"),
        ([group("FullAttentionSpec"), group("MambaSpec")], "2 KV groups of FullAttentionSpec, MambaSpec"),
        ([group("SlidingWindowSpec")], "1 KV groups of SlidingWindowSpec"),
        ([group("UniformTypeKVCacheSpecs", a="SlidingWindowSpec")], "1 KV groups of SlidingWindowSpec"),
        ([group("HiddenStateCacheSpec")], "1 KV groups of HiddenStateCacheSpec"),
        ([group("RSWASpec")], "1 KV groups of RSWASpec"),
        ([group("SinkFullAttentionSpec")], "1 KV groups of SinkFullAttentionSpec"),
        ([], "0 KV groups"),
    ],
)
def test_kv_of_which_blocks_would_be_left_behind_is_refused(module: Any, groups: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}.*: refused where a stage sends or takes KV: .* use a layout"):
        module.GroupedKVConnector(None, None, SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize(
    "only",
    [
        group("FullAttentionSpec"),
        group("MLAAttentionSpec"),
        group("AscendMLAAttentionSpec"),
        group("UniformTypeKVCacheSpecs", a="AscendMLAAttentionSpec"),
    ],
)
def test_one_group_of_full_attention_is_taken(only: Any) -> None:
    check_kv_groups(SimpleNamespace(kv_cache_groups=[only]))


class PlayedScheduler:
    """Either half's scheduler: remembers which requests it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def queued(self, request: Any) -> None:
        self.asked.append(f"queued {request.request_id}")

    def may_run(self, request: Any) -> bool:
        self.asked.append(f"may run {request.request_id}")
        return False

    def tokens_to_load(self, request: Any, computed: int) -> int:
        self.asked.append(f"load {request.request_id}")
        return 7

    def finished(self, request: Any) -> tuple[bool, Any]:
        self.asked.append(f"finished {request.request_id}")
        return True, {"ok": True}

    def step(self, output: Any) -> str:
        return output

    def received(self, requests: set[str]) -> None:
        self.asked += [f"received {one}" for one in requests]

    def sent(self, requests: set[str]) -> None:
        self.asked += [f"sent {one}" for one in requests]


def test_with_both_halves_each_request_goes_to_the_one_that_its_parameters_name(module: Any) -> None:
    connector = object.__new__(module.GroupedKVConnector)
    p, d = connector.prefill_scheduler, connector._decode_scheduler = PlayedScheduler(), PlayedScheduler()
    peer = {"instance": "P1", "incarnation": "i", "endpoint": "ipc:///P1.kv"}
    to_send = SimpleNamespace(request_id="s", kv_transfer_params={"transfer_id": "t", "incarnation": "i"})
    to_take = SimpleNamespace(request_id="t", kv_transfer_params={"transfer_id": "t", "peer": peer})
    alone = SimpleNamespace(request_id="a", kv_transfer_params=None)
    assert connector.get_num_new_matched_tokens(to_send, 0) == (None, False)
    assert connector.get_num_new_matched_tokens(alone, 0) == (None, False)
    assert connector.get_num_new_matched_tokens(to_take, 0) == (7, True)
    assert connector.request_finished(to_send, []) == (True, {"ok": True})
    assert connector.request_finished(to_take, []) == (False, None)
    connector.update_connector_output(SimpleNamespace(finished_sending={"s"}, finished_recving={"t"}))
    assert p.asked == ["may run s", "may run a", "finished s", "sent s"]
    assert d.asked == ["load t", "finished t", "received t"]
    step = connector.build_connector_meta("step")
    assert (step.prefill, step.decode) == ("step", "step")


def test_with_both_halves_both_workers_share_the_cache_and_report_what_is_theirs(module: Any) -> None:
    connector = object.__new__(module.GroupedKVConnector)
    registered: list[Any] = []
    connector._open_cache = lambda tensors: ("cache", tensors)
    connector._prefill_worker = SimpleNamespace(register=registered.append, take_over=lambda finished: finished)
    connector._decode_worker = SimpleNamespace(register=registered.append, take_finished=lambda: {"t"})
    connector.register_kv_caches("tensors")
    assert registered == [("cache", "tensors")] * 2 and registered[0] is registered[1]
    assert connector.get_finished({"s"}) == ({"s"}, {"t"})
