"""Parts of an image: what an encoder cuts of vLLM's item, and how a consumer gets one feature out of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd_serve import wire
from epd_serve.engine.ec.encoder_scheduler import EncoderScheduler
from epd_serve.engine.ec.partial_prefill import SpareBlocks
from epd_serve.engine.ec.parts import with_part_alone
from epd_serve.roles import Role
from store.arena import Arena
from store.feature_pool import FeaturePool
from store.keys import part_keys
from tests.epd_serve.engine.ec.stages import Stages, feature, is_ready
from tests.epd_serve.engine.ec.vllm_stub import ECConnectorRole, Make, output, request
from tests.waiting import wait_for

ROWS = 3  # of a tile
BOTH = {wire.PARTS_XARG: ",".join(part_keys("k", 2))}


@dataclass(frozen=True)
class Elem:
    data: Any


@dataclass(frozen=True)
class Position:
    """As vLLM's `PlaceholderRange`."""

    offset: int
    length: int
    is_embed: torch.Tensor | None = None

    def get_num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(self.is_embed.sum())


@dataclass(frozen=True)
class Feature:
    identifier: str
    data: dict[str, Elem] | None
    mm_position: Position


def image(name: str, tiles: int, pixels: str = "pixel_values", *, framed: bool = True, rows: int = ROWS) -> Feature:
    """With a token before and one behind its rows, or without."""
    mask = torch.tensor([False, *[True] * (tiles * rows), False]) if framed else None
    position = Position(5, tiles * rows + 2 * framed, mask)
    item = {pixels: Elem(torch.arange(tiles * 2).view(tiles, 2)), "image_num_patches": Elem(torch.tensor(tiles))}
    return Feature(name, {**item, "image_token_id": Elem(torch.tensor(7))}, position)


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("pixels", ["pixel_values", "pixel_values_flat"])
@given(tiles=st.integers(1, 13), count=st.integers(1, 8))
def test_the_parts_of_an_image_are_its_tiles_each_once(pixels: str, framed: bool, tiles: int, count: int) -> None:
    parts = [with_part_alone(image(key, tiles, pixels, framed=framed)) for key in part_keys("k", count)]
    if tiles < count:
        assert "k" in {one.identifier for one in parts}, "one has no tile left"
        return
    items = [one.data for one in parts if one.data is not None]
    assert torch.equal(torch.cat([item[pixels].data for item in items]), torch.arange(tiles * 2).view(tiles, 2))
    for one, item in zip(parts, items, strict=True):
        own = len(item[pixels].data)
        assert int(item["image_num_patches"].data) == own and one.mm_position.get_num_embeds() == own * ROWS
        assert one.mm_position.offset == 5 and one.mm_position.length <= tiles * ROWS + 2
        assert item["image_token_id"].data == 7
    assert tuple(one.identifier for one in parts) == part_keys("k", count)


def test_the_item_that_vllms_cache_holds_stays_whole() -> None:
    whole = image("k/1-2", 4)
    with_part_alone(whole)
    assert whole.data is not None and len(whole.data["pixel_values"].data) == 4
    assert whole.data["image_num_patches"].data == 4 and whole.mm_position.length == 4 * ROWS + 2


@pytest.mark.parametrize(
    "strange",
    [
        image("k/0-2", 1),
        image("k/0-2", 4, "pixels of another model"),
        Feature("k/0-2", {"pixel_values": Elem(torch.ones(4, 2))}, Position(0, 4)),
        Feature("k/0-2", None, Position(0, 4)),
        Feature("k/0-2", image("", 4).data, Position(0, 4 * ROWS + 1)),
        Feature("k/0-2", {**(image("", 4).data or {}), "pixel_values": Elem(torch.ones(5, 2))}, Position(0, 12)),
    ],
)
def test_what_cannot_be_cut_is_encoded_whole_under_the_name_of_the_whole(strange: Feature) -> None:
    left = with_part_alone(strange)
    assert (left.identifier, left.data, left.mm_position) == ("k", strange.data, strange.mm_position)


def test_an_encoder_cuts_before_vllm_looks_and_reports_the_part(arena: Arena) -> None:
    scheduler = EncoderScheduler(FeaturePool(Arena.attach(arena.path)), lambda features: {})
    asked = request("r")
    asked.mm_features = [image("k/1-2", 5), image("other", 5)]
    scheduler.may_run(asked, 0)
    assert [one.mm_position.get_num_embeds() for one in asked.mm_features] == [3 * ROWS, 5 * ROWS]
    assert [item.key for item in scheduler.step([]).needed] == ["k/1-2", "other"]
    scheduler.may_run(asked, 0)
    assert asked.mm_features[0].mm_position.get_num_embeds() == 3 * ROWS, "cut twice"
    scheduler.close()


def put(arena: Arena, key: str, rows: torch.Tensor) -> None:
    arena.put(key, rows.view(torch.uint8).numpy().reshape(-1), shape=tuple(rows.shape), dtype="bfloat16")


def loaded(make: Make, scheduler: Any, asked: Any) -> dict[str, torch.Tensor]:
    """What vLLM's encoder cache has after the step in which the request runs."""
    worker, cache = make(Role.P, ECConnectorRole.WORKER), dict[str, torch.Tensor]()
    for index, item in enumerate(asked.mm_features):
        if scheduler.has_cache_item(item.identifier):
            scheduler.update_state_after_alloc(asked, index)
    worker.bind_connector_metadata(scheduler.build_connector_meta(output()))
    worker.start_load_caches(cache)
    return cache


def test_a_consumer_joins_the_parts_and_gives_them_back_at_the_end(make: Make, arena: Arena) -> None:
    scheduler, whole, other = make(Role.P, ECConnectorRole.SCHEDULER), feature(8), feature(2)
    for key, rows in zip(part_keys("k", 2), whole.split([3, 5]), strict=True):
        put(arena, key, rows)
    put(arena, "other", other)
    asked = request("r", "k", "other", **BOTH)
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    cache = loaded(make, scheduler, asked)
    assert set(cache) == {"k", "other"}
    assert torch.equal(cache["k"], whole) and torch.equal(cache["other"], other)
    scheduler.request_finished(asked)
    scheduler.build_connector_meta(output("r"))
    wait_for(lambda: arena.stats().leased == 0)


def test_a_request_waits_for_the_last_part(make: Make, arena: Arena) -> None:
    scheduler, whole = make(Role.P, ECConnectorRole.SCHEDULER), feature(8)
    asked = request("r", "k", **BOTH)
    put(arena, "k/1-2", whole[4:])
    scheduler.consumer.arrived(asked)
    wait_for(lambda: is_ready(scheduler.consumer, "k/1-2"))
    assert not scheduler.ensure_cache_available(asked, 0)
    put(arena, "k/0-2", whole[:4])
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    assert torch.equal(loaded(make, scheduler, asked)["k"], whole)


def test_a_request_that_was_told_of_no_parts_has_the_use_of_the_whole_beside_one_that_was(
    make: Make, arena: Arena
) -> None:
    scheduler, whole = make(Role.P, ECConnectorRole.SCHEDULER), feature(8)
    waits, runs = request("waits", "k", **BOTH), request("runs", "k")
    assert not scheduler.ensure_cache_available(waits, 0)
    put(arena, "k", whole)
    wait_for(lambda: scheduler.ensure_cache_available(runs, 0))
    assert torch.equal(loaded(make, scheduler, runs)["k"], whole)


def test_a_lost_part_is_a_lost_image_and_is_told_under_the_images_name(
    make: Make, arena: Arena, stages: Stages
) -> None:
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER, feature_wait_s=0.0)
    ear = stages.ear("P0")
    wait_for(lambda: ear.of(wire.StoreReport))
    put(arena, "k/0-2", feature(4))
    asked = request("r", "k", epd_on_missing="fail", **BOTH)
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0) or scheduler.take_unavailable_requests() == {"r"})
    wait_for(lambda: ear.of(wire.FeatureMissing, keys=["k"]))


def test_an_image_that_lacks_a_part_is_encoded_here_where_that_is_allowed(make: Make, arena: Arena) -> None:
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER, feature_wait_s=0.0)
    put(arena, "k/0-2", feature(4))
    asked = request("r", "k", **BOTH)
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    assert not scheduler.has_cache_item("k"), "half of an image is none"
    assert loaded(make, scheduler, asked) == {}


def test_a_prefill_begins_up_to_the_item_that_lacks_a_part(make: Make, arena: Arena) -> None:
    scheduler = make(Role.P, ECConnectorRole.SCHEDULER)
    consumer = scheduler.consumer
    consumer.allow_partial(SpareBlocks(100, (1,)))
    for key in ("k/0-2", "k/1-2", "l/0-2"):
        put(arena, key, feature(4))
    words = {wire.PARTS_XARG: ",".join([*part_keys("k", 2), *part_keys("l", 2)])}
    asked = request("r", "k", "l", apart=10, **words)
    wait_for(lambda: scheduler.ensure_cache_available(asked, 0))
    assert consumer.runs_partially(asked)
    assert consumer.tokens_before_awaited(asked, 0, 20) == 10
    assert scheduler.has_cache_item("k") and not scheduler.has_cache_item("l")
