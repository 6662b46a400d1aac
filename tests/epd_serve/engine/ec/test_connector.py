"""The connector between vLLM's hooks and ours, called in vLLM's order. vLLM is a stub here, real in tests/e2e."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from epd_serve.engine import compat
from epd_serve.engine.ec.partial_prefill import SpareBlocks
from epd_serve.roles import Role
from store.arena import Arena
from tests.epd_serve.engine.ec.stages import Stages, feature, is_ready, needed
from tests.epd_serve.engine.ec.vllm_stub import GRID, ECConnectorRole, Make, output, request
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for


def put(arena: Arena, key: str) -> torch.Tensor:
    data = np.arange(64, dtype=np.uint8)
    arena.put(key, data, shape=(64,), dtype="uint8")
    return torch.from_numpy(data)


def test_a_consumer_loads_what_it_promised_and_unpins_it_at_the_end(make: Make, arena: Arena) -> None:
    scheduler, worker = make(Role.P, ECConnectorRole.SCHEDULER), make(Role.P, ECConnectorRole.WORKER)
    asked, made = request("r", "k"), put(arena, "k")
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    assert scheduler.has_cache_item("k")
    scheduler.update_state_after_alloc(asked, 0)
    cache: dict[str, torch.Tensor] = {}
    worker.bind_connector_metadata(scheduler.build_connector_meta(output()))
    worker.start_load_caches(cache)
    assert torch.equal(cache["k"], made)
    assert scheduler.request_finished(asked) == (False, None)
    scheduler.build_connector_meta(output("r"))
    wait_for(lambda: arena.stats().leased == 0)


def test_a_feature_is_stamped_as_loaded_when_the_device_has_it(
    make: Make, arena: Arena, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's thread runs ahead of its device: that it has queued the copy is no admission."""
    device, copied, trace = FakeDevice(), threading.Event(), stages.folder / "P0.jsonl"
    device.enter_thread()
    monkeypatch.setattr("epd_serve.engine.ec.connector.memory_here", lambda kind: device)
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER)
    worker = make(Role.P, ECConnectorRole.WORKER, trace_path=str(trace))
    asked = request("r", "k")
    put(arena, "k")
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    assert scheduler.has_cache_item("k")
    scheduler.update_state_after_alloc(asked, 0)
    worker.bind_connector_metadata(scheduler.build_connector_meta(output()))
    device.run(copied.wait)
    worker.start_load_caches({})
    wait_for(device.waited_for)
    assert "feature_loaded" not in trace.read_text()
    queued_s = time.monotonic()
    copied.set()
    wait_for(lambda: "feature_loaded" in trace.read_text())
    stamp = json.loads(trace.read_text())
    assert (stamp["subject"], stamp["event"]) == ("k", "feature_loaded")
    assert stamp["t0"] < queued_s < stamp["t"]
    assert not device.broken


def test_what_is_here_is_known_when_its_request_arrives_whatever_that_waits_for(make: Make, arena: Arena) -> None:
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER)
    asked = request("r", "k", "not here")
    put(arena, "k")
    scheduler.consumer.arrived(asked)
    consumer: Any = scheduler.consumer
    wait_for(lambda: is_ready(consumer, "k"))
    wait_for(lambda: arena.stats().leased == 0)
    assert scheduler.ensure_cache_available(request("s", "k"), 0), "at once"
    assert arena.stats().leased == 1
    scheduler.build_connector_meta(output("s"))
    wait_for(lambda: arena.stats().leased == 0)


@pytest.mark.parametrize(
    ("role", "both", "received", "computes"),
    [
        (Role.P, False, False, True),
        (Role.PD, False, False, True),
        (Role.D, False, True, False),
        (Role.P, True, True, False),  # switchable, and D of this request
        (Role.D, True, False, True),
    ],
)
def test_who_computes_the_prompt_of_a_request_looks_for_its_features(
    make: Make, role: Role, both: bool, received: bool, computes: bool
) -> None:
    scheduler, asked = make(role, ECConnectorRole.SCHEDULER, both=both), request("r", "k")
    peer = {"instance": "P1", "incarnation": "i", "endpoint": "ipc:///nowhere"}
    asked.kv_transfer_params = {"transfer_id": "t", "peer": peer} if received else None
    scheduler.consumer.arrived(asked)
    assert ("k" in scheduler.consumer.features._rows) is computes


def test_what_comes_between_the_answer_and_the_allocation_is_not_loaded(make: Make, arena: Arena) -> None:
    """vLLM encodes it in this step; the worker's order of loading and encoding must not matter."""
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER)
    asked = request("r", "k")
    scheduler.ensure_cache_available(asked, 0)
    assert not scheduler.has_cache_item("k")
    put(arena, "k")
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    scheduler.update_state_after_alloc(asked, 0)
    assert scheduler.build_connector_meta(output()).step.loads == []


@pytest.mark.parametrize("how", [{"epd_on_missing": "fail"}, {"bare": True}])
def test_a_request_without_pixels_is_failed_not_encoded(make: Make, how: dict[str, Any]) -> None:
    scheduler = make(Role.D, ECConnectorRole.SCHEDULER, feature_wait_s=0.05)
    asked, taken = request("chatcmpl-x-00000000", "k", **how), set[str]()

    def failed() -> bool:
        assert not scheduler.ensure_cache_available(asked, 0)
        taken.update(scheduler.take_unavailable_requests())
        scheduler.build_connector_meta(output(tokens=0))  # an engine that has nothing else to do
        return bool(taken)

    wait_for(failed)
    assert taken == {"chatcmpl-x-00000000"}
    assert scheduler.take_unavailable_requests() == set()
    scheduler.request_finished(asked)
    scheduler.build_connector_meta(output(*taken))


def test_a_request_whose_items_are_computed_needs_nothing(make: Make) -> None:
    scheduler = make(Role.D, ECConnectorRole.SCHEDULER)
    assert scheduler.ensure_cache_available(request("r", "k"), 10)


@pytest.mark.parametrize(
    ("role", "how", "kept"),
    [(Role.D, {"bare": True}, ["k"]), (Role.PD, {"bare": True}, ["k"]), (Role.P, {"bare": True}, []), (Role.D, {}, [])],
)
def test_who_decodes_keeps_what_a_preempted_request_could_not_make_again(
    make: Make, arena: Arena, role: Role, how: dict[str, Any], kept: list[str]
) -> None:
    put(arena, "k")
    scheduler = make(role, ECConnectorRole.SCHEDULER)
    assert scheduler.ensure_cache_available(request("r", "k", **how), 10)  # its items are computed: KV from P
    consumer: Any = scheduler.consumer
    assert consumer.features.protected() == kept
    scheduler.build_connector_meta(output("r"))
    assert consumer.features.protected() == []


def test_decode_reserves_nothing_while_the_first_of_its_features_is_being_made(make: Make, stages: Stages) -> None:
    encoder, scheduler = stages.producer(), make(Role.D, ECConnectorRole.SCHEDULER)

    def heard() -> bool:
        encoder.step(needed("k", "later", **GRID))
        return bool(scheduler.consumer.features.makes("later", time.monotonic()))

    wait_for(heard)
    new, given_up = request("r", "k", "later"), request("g", "k", epd_missing="k")
    for _ in range(3):
        assert not scheduler.ensure_cache_available(new, 10)
        scheduler.build_connector_meta(output(tokens=0))
    assert scheduler.consumer.waiting(), "an idle scheduler sleeps meanwhile"
    assert scheduler.ensure_cache_available(given_up, 10), "no encoder makes what this one needs"
    encoder.save({"k": feature()}, "k")
    wait_for(lambda: scheduler.ensure_cache_available(new, 10))
    scheduler.consumer.features.made(["k"], time.monotonic())  # for somebody else, once more
    assert not scheduler.ensure_cache_available(request("s", "k"), 10)
    assert scheduler.ensure_cache_available(new, 10), "a request that runs is never held up"
    scheduler.build_connector_meta(output("r"))
    assert "r" not in scheduler.consumer._reserved


def test_an_encoder_that_falls_silent_holds_decode_up_for_a_while_only(make: Make, stages: Stages) -> None:
    scheduler = make(Role.D, ECConnectorRole.SCHEDULER, feature_wait_s=0.1)
    scheduler.consumer.features.made(["k"], time.monotonic())
    assert not scheduler.ensure_cache_available(request("r", "k"), 10)
    wait_for(lambda: scheduler.ensure_cache_available(request("r", "k"), 10))


def test_what_was_not_encoded_is_recomputed_without_waiting(make: Make) -> None:
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER)
    asked = request("r", "k", epd_missing="k")
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0), timeout_s=2.0)
    assert not scheduler.has_cache_item("k")


def test_a_request_begins_before_an_awaited_item_as_soon_as_that_is_known_not_to_be_here(
    make: Make, arena: Arena
) -> None:
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER)
    scheduler.consumer.allow_partial(SpareBlocks(spare=100, block_sizes=(16,)))
    asked = request("r", "a", "b", "c", apart=20)
    put(arena, "a")
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    assert scheduler.consumer.tokens_before_awaited(asked, 0, 70) == 20
    assert scheduler.has_cache_item("a") and not scheduler.has_cache_item("b")
    assert not scheduler.ensure_cache_available(asked, 20), "nothing is left to compute"
    assert scheduler.consumer.tokens_before_awaited(asked, 20, 50) == 0
    assert scheduler.consumer.tokens_before_awaited(request("other", "x"), 0, 10) == 10, "nobody else is held up"
    put(arena, "b")
    put(arena, "c")
    wait_for(lambda: scheduler.ensure_cache_available(asked, 20) and scheduler.has_cache_item("c"))
    assert scheduler.consumer.tokens_before_awaited(asked, 20, 50) == 50


def test_a_request_waits_for_all_its_items_where_nobody_said_that_it_may_begin(make: Make, arena: Arena) -> None:
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER)
    asked = request("r", "a", "b", apart=20)
    put(arena, "a")
    scheduler.ensure_cache_available(asked, 0)
    consumer: Any = scheduler.consumer
    wait_for(lambda: is_ready(consumer, "a"))
    assert not scheduler.ensure_cache_available(asked, 0)
    assert not scheduler.has_cache_item("a"), "all of its items, or none"


def test_an_encoder_answers_with_keys_and_metadata(make: Make, arena: Arena) -> None:
    scheduler, worker = make(Role.E, ECConnectorRole.SCHEDULER), make(Role.E, ECConnectorRole.WORKER)
    asked = request("r", "k")
    assert scheduler.ensure_cache_available(asked, 0)
    assert not scheduler.has_cache_item("k")
    scheduler.update_state_after_alloc(asked, 0)
    cache: dict[str, torch.Tensor] = {}
    worker.bind_connector_metadata(scheduler.build_connector_meta(output()))
    worker.start_save_caches(encoder_cache=cache)
    cache["k"] = torch.ones(4)
    worker.save_caches(cache, "k")
    assert scheduler.request_finished(asked) == (False, {"k": {"item_indices": [0], "metadata": GRID}})
    wait_for(lambda: arena.contains("k"))


def test_a_vllm_that_does_not_hand_its_cache_over_encodes_everything(
    make: Make, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "hands_over_encoder_cache", lambda: False)
    monkeypatch.setattr(compat, "tells_finished_requests", lambda: False)
    scheduler, worker = make(Role.E, ECConnectorRole.SCHEDULER), make(Role.E, ECConnectorRole.WORKER)
    put(arena, "k")
    assert scheduler.ensure_cache_available(request("r", "k"), 0)
    assert not scheduler.has_cache_item("k")
    worker.bind_connector_metadata(scheduler.build_connector_meta(output()))
    made = torch.ones(4)
    worker.save_caches({"k": made}, "k")
    assert scheduler.build_connector_meta(output("r")).step.held == []
