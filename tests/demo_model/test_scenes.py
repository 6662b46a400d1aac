"""Scenes of training and of evaluation, and the fast drawing of them."""

from __future__ import annotations

import numpy as np
import pytest

from epd_serve.demo import pictures
from epd_serve.demo.pictures import COLOURS, KINDS, Shape
from tests.demo_model.architecture import FACTOR, PATCH, picture_grid
from tests.demo_model.raster import NAMES, from_picture, rasterize
from tests.demo_model.scenes import Scene, held_out, random_scene, random_size


def test_no_arrangement_is_on_both_sides_of_the_split():
    chance = np.random.default_rng(0)
    trained = {random_scene(chance).shapes for _ in range(300)}
    evaluated = {random_scene(chance, evaluation=True).shapes for _ in range(300)}

    assert trained & evaluated <= {()}  # the empty scene has no arrangement
    assert all(map(held_out, evaluated - {()})) and not any(map(held_out, trained))


def test_the_same_seed_gives_the_same_scene():
    assert random_scene(np.random.default_rng(5)) == random_scene(np.random.default_rng(5))


def test_a_scene_lists_its_shapes_left_to_right_and_shows_them_all():
    chance = np.random.default_rng(1)
    for _ in range(200):
        scene = random_scene(chance)
        cells = [(shape.column, shape.row) for shape in scene.shapes]
        assert cells == sorted(cells) and len(set(cells)) == len(cells)
        assert scene.background not in {shape.colour for shape in scene.shapes}


def test_sizes_reach_from_64_pixels_to_4k():
    chance = np.random.default_rng(2)
    sizes = [random_size(chance) for _ in range(3000)]

    assert min(min(size) for size in sizes) == 64
    assert (3840, 2160) in sizes


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((224, 224), (12, 12)),
        ((64, 64), (10, 10)),
        ((3840, 2160), (8, 16)),
        ((320, 200), (8, 14)),
        ((256, 256), (12, 12)),
    ],
)
def test_the_processor_gives_any_picture_about_as_many_patches(size, grid):
    assert picture_grid(*size) == grid


@pytest.mark.parametrize("size", [(64, 64), (128, 128), (224, 224), (512, 288), (300, 600), (1024, 1024)])
def test_the_fast_drawing_is_what_draw_and_the_processor_give(size):
    shapes = (Shape("red", "circle", 0, 0), Shape("blue", "triangle", 1, 1), Shape("green", "square", 0, 2))
    fast = rasterize(Scene(shapes, "grey", size)).patches
    slow = from_picture(pictures.draw(shapes, size, "grey")).patches

    assert fast.shape == slow.shape == (np.prod(picture_grid(*size)), 3 * PATCH**2)
    assert np.abs(fast - slow).mean() < 0.02  # of a range of 2: edges only
    assert np.median(np.abs(fast - slow)) < 1e-3


def test_every_shape_is_taught_where_it_is():
    for kind in KINDS:
        for colour in COLOURS:
            labels = rasterize(Scene((Shape(colour, kind, 2, 0),), "white", (224, 224))).labels
            name, rank, cell = labels.reshape(6, 6, 3).transpose(2, 0, 1)
            assert set(name[4:, :2].ravel()) <= {0, 1 + NAMES.index(f"{colour} {kind}")} and name[4:, :2].any()
            assert not name[:4].any() and not name[:, 2:].any()
            assert (rank == (name > 0)).all()
            assert (cell[4:, :2] == 6).all() and cell[0, 0] == 0 and cell[5, 5] == 8


def test_variation_keeps_the_picture():
    scene = Scene((Shape("red", "circle"),), "white", (200, 200))
    plain, varied = rasterize(scene), rasterize(scene, np.random.default_rng(3))

    assert 0 < np.abs(plain.patches - varied.patches).mean() < 0.1
    assert (plain.labels[:, 2] == varied.labels[:, 2]).all()
    assert plain.patches.shape[0] * PATCH**2 % FACTOR**2 == 0
