"""One image over several encoders: the simulator spreads it as the proxy does, and takes its parts side by side."""

from __future__ import annotations

import pytest

from deploy.planner.workload import workload_of
from epd_serve.image_tokens import ByArea, Tiled
from epd_serve.roles import Role
from epd_serve.traffic import Item, Request
from store.keys import Part, part_of, whole_of
from tests.deploy.planner.rounds import PROFILE, served
from tests.proxy.fakes import cluster, data_url, encodes, image_file, settings

SIDE, EACH = 8, 256
RULE = Tiled(SIDE, EACH, 1, 6, thumbnail=True)
COLORS = ("red", "blue")


def tiled(tiles: int, key: str = "k") -> Item:
    return Item(EACH * tiles, key=key, tiles=tiles)


def about(*items: Item) -> Request:
    return Request("r", 0.0, 10 + sum(item.tokens for item in items), 2, items)


def tokens_of(name: str, items: dict[str, int]) -> int:
    """What an encoder computes of what the proxy called by this name. `items`: tiles by key."""
    part = part_of(name) or Part(name, 0, 1)
    return EACH * len(part.of(items[part.whole]))


@pytest.mark.parametrize(
    ("encoders", "images", "image_parts"),
    [
        (2, (4,), 8),
        (3, (4,), 8),
        (4, (3,), 8),
        (5, (7,), 8),
        (4, (4,), 2),
        (3, (4,), 1),
        (4, (4, 4), 8),
        (5, (7, 3), 8),
    ],
)
async def test_simulated_and_live_agree_on_who_encodes_how_much(
    encoders: int, images: tuple[int, ...], image_parts: int
) -> None:
    names = [f"E{index}" for index in range(encoders)]
    async with cluster(*names, "PD0", config=settings(image_tokens=RULE, image_parts=image_parts)) as c:
        for name in names:
            c[name].usual = encodes()
        sizes = zip(images, COLORS, strict=False)
        shown = [data_url(image_file(SIDE * (tiles - 1), SIDE, color)) for tiles, color in sizes]
        assert (await c.ask(*shown)).status_code == 200
        called = {name: [key for keys in c[name].keys for key in keys] for name in names}
        keys = [whole_of(part["uuid"]) for part in c["PD0"].calls[-1].body["messages"][0]["content"] if "uuid" in part]
        keys = list(dict.fromkeys(keys))
    tiles_by_key = dict(zip(keys, images, strict=True))
    live = {name: sum(tokens_of(key, tiles_by_key) for key in called[name]) for name in names}
    request = about(*(tiled(tiles, key) for key, tiles in tiles_by_key.items()))
    run = served(f"{encoders}E-PD", request, image_parts=image_parts)
    token_s = PROFILE.stages[1].encode.per_unit_s
    simulated = {name: round(run.busy[name]["encode"] * run.span_s / token_s) for name in names}
    assert simulated == live and sum(live.values()) == EACH * sum(images)


def test_parts_take_as_long_as_the_largest_and_the_front_sees_the_whole_image() -> None:
    whole, four = (served("4E-PD", about(tiled(8)), image_parts=parts).served[0] for parts in (1, 8))
    assert whole.ttft_s - four.ttft_s == pytest.approx(0.001 * EACH * (8 - 2))
    assert (len(whole.instances), len(four.instances)) == (2, 5)


def test_an_encoder_with_something_to_do_gets_no_part() -> None:
    """The second image comes while all encode the first one."""
    first, second = about(tiled(8, "a")), Request("s", 0.6, 10 + 8 * EACH, 2, (tiled(8, "b"),))
    one, other = served("4E-PD", first, second).served
    assert len(one.instances) == 5 and len(other.instances) == 2


def test_whoever_wants_the_same_image_meanwhile_waits_for_all_of_its_parts() -> None:
    twice = [Request(f"r{number}", 0.01 * number, 10 + 8 * EACH, 2, (tiled(8),)) for number in range(2)]
    one, other = served("4E-PD", *twice).served
    assert len(one.instances) == 5 and other.instances == ("PD0",)
    assert other.first_s > 0.5 + 0.001 * EACH * 2 + 0.04


def test_encoders_on_one_device_count_as_one() -> None:
    (one,) = served("(E-P)x2-D", about(tiled(8))).served
    assert sum(name.startswith(Role.E) for name in one.instances) == 2
    (alone,) = served("(E-PD)", about(tiled(8))).served
    assert sum(name.startswith(Role.E) for name in alone.instances) == 1


def test_a_planned_workload_has_the_tiles_of_its_model() -> None:
    (tiled_one,) = workload_of("images=1@24x8", RULE).at(1.0, 1, 0)[0].items
    assert (tiled_one.tiles, tiled_one.tokens) == (4, 4 * EACH)
    (whole,) = workload_of("images=1@280x280", ByArea()).at(1.0, 1, 0)[0].items
    assert whole.tiles == 1
