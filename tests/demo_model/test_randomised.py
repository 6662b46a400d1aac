"""Pictures of training that are drawn as others might draw them: what they show is what the scene says."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest

from epd_serve.demo.pictures import COLOURS, GRID, KINDS, Shape
from tests.demo_model import backdrops, placement, randomised
from tests.demo_model.placement import places
from tests.demo_model.raster import NAMES, rasterize
from tests.demo_model.scenes import Scene, random_scene

SCENE = Scene((Shape("red", "circle", 0, 0), Shape("blue", "triangle", 1, 1)), "white", (224, 224))


def seeds(number: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(number)]


def test_shapes_lie_inside_the_picture_apart_and_in_an_order_that_can_be_told():
    for chance in seeds(300):
        scene = random_scene(chance)
        found = places(scene.shapes, scene.size, chance)
        cell = scene.size[0] / GRID
        for index, (shape, it) in enumerate(zip(scene.shapes, found, strict=True)):
            assert it.half <= it.x <= scene.size[0] - it.half and it.half <= it.y <= scene.size[1] - it.half
            assert int(it.x / cell) == shape.column and int(it.y / scene.size[1] * GRID) == shape.row
            for other, its in zip(scene.shapes[:index], found[:index], strict=True):
                dx, dy = it.x - its.x, it.y - its.y
                assert max(abs(dx), abs(dy)) > it.half + its.half
                assert abs(dx) <= 0.25 * cell and dy > 0 if shape.column == other.column else dx >= 0.6 * cell


def test_places_are_those_of_the_grid_where_chance_finds_no_clear_ones(monkeypatch):
    monkeypatch.setattr(placement, "_clear", lambda *_: False)
    shapes = tuple(Shape("red", "circle", 1, column) for column in range(GRID))

    found = places(shapes, (300, 300), np.random.default_rng(0))

    assert [it.x for it in found] == pytest.approx([50, 150, 250])
    assert [it.y for it in found] == pytest.approx([150] * 3)


@pytest.mark.parametrize("name", [*COLOURS, "white", "grey", "black"])
def test_a_shade_is_nearest_to_the_colour_that_it_is_named_after(name):
    """In hue for colours, in lightness for the others."""
    for chance in seeds(200):
        red, green, blue = (float(it) for it in backdrops.shade(name, chance))
        assert min(red, green, blue) >= 0 and max(red, green, blue) <= 255
        if name in ("white", "grey", "black"):
            nearest = min((("white", 255), ("grey", 128), ("black", 0)), key=lambda it: abs(it[1] - green))[0]
        else:
            hue = 360 * colorsys.rgb_to_hsv(red, green, blue)[0]
            hues = {"red": 0, "orange": 29, "yellow": 51, "green": 123, "blue": 220, "purple": 285}
            nearest = min(hues, key=lambda it: min(abs(hue - hues[it]), 360 - abs(hue - hues[it])))
        assert nearest == name


def test_a_picture_is_as_large_as_asked_and_covered_where_its_shapes_are():
    for chance in seeds(60):
        picture, covered = randomised.draw(SCENE, (192, 160), 1.0, chance)
        assert picture.shape == (160, 192, 3) and picture.min() >= 0 and picture.max() <= 255
        assert covered.shape == (2, 160, 192) and (covered.sum(axis=(1, 2)) > 60).all()
        assert (covered.sum(axis=0) <= 1.01).mean() > 0.999  # next to one another, not on one another
        (_, left), (_, right) = (np.argwhere(it > 0.5).mean(axis=0) for it in covered)
        assert left < right


def test_some_shapes_that_are_alone_in_the_middle_fill_the_picture():
    scene = Scene((Shape("red", "square"),), "white", (300, 200))
    shares = [randomised.draw(scene, (288, 192), 1.0, chance)[1].mean() for chance in seeds(60)]

    assert 5 < sum(it > 0.25 for it in shares) < 40 and max(shares) < 0.65


def test_a_shape_has_its_colour_in_the_picture():
    """In most pictures: light and noise may move a channel, and of a hollow one the middle is the background."""
    right = 0
    for chance in seeds(100):
        picture, covered = randomised.draw(
            Scene((Shape("red", "circle"),), "white", (200, 200)), (192, 192), 1.0, chance
        )
        red, green, blue = picture[covered[0] > 0.5].mean(axis=0)
        right += red > 1.3 * green and red > 1.3 * blue

    assert right > 85


@pytest.mark.parametrize("kind", KINDS)
def test_the_randomised_share_is_drawn_so_and_taught_the_same_names(kind):
    scene = Scene((Shape("green", kind, 1, 1),), "black", (224, 224))
    plain, varied = (rasterize(scene, np.random.default_rng(1), share) for share in (0.0, 1.0))

    assert np.abs(plain.patches - varied.patches).mean() > 0.01
    assert {0, 1 + NAMES.index(f"green {kind}")} == set(varied.labels[:, 0].tolist())
    assert (plain.labels[:, 2] == varied.labels[:, 2]).all()


def test_the_same_chance_draws_the_same_picture():
    one, two = (rasterize(SCENE, np.random.default_rng(4), 1.0).patches for _ in range(2))

    assert (one == two).all()
