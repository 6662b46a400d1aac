"""The pictures of the demo model, and the samples that ship."""

from __future__ import annotations

import pytest
from PIL import Image

from epd_serve.demo.pictures import BACKGROUNDS, COLOURS, KINDS, SAMPLES, Shape, describe, draw, sample_path, scene
from epd_serve.errors import ConfigError
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, WHAT


def test_the_same_arguments_give_the_same_pixels():
    shapes = (Shape("red", "circle", 0, 0), Shape("blue", "triangle", 2, 1))

    assert draw(shapes, (320, 200), "grey").tobytes() == draw(shapes, (320, 200), "grey").tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_shape_fills_the_middle_of_its_cell_and_nothing_else(colour, kind):
    picture = draw([Shape(colour, kind, 0, 2)], 300)

    assert picture.getpixel((250, 55)) == COLOURS[colour]
    assert picture.getpixel((150, 150)) == BACKGROUNDS["white"]


@pytest.mark.parametrize("size", [64, (320, 200), (200, 320), 1024])
def test_a_picture_has_the_size_that_was_asked_for(size):
    assert draw([], size).size == ((size, size) if isinstance(size, int) else size)


@pytest.mark.parametrize("arguments", [("pink", "circle"), ("red", "star"), ("red", "circle", 3, 0)])
def test_what_the_model_never_saw_is_refused(arguments):
    with pytest.raises(ConfigError):
        Shape(*arguments)


def test_an_unknown_background_is_refused():
    with pytest.raises(ConfigError, match="background"):
        draw([], 64, "plaid")


def test_a_scene_is_fixed_by_its_seed_and_listed_in_order():
    for seed in range(50):
        shapes = scene(seed)
        assert shapes == scene(seed)
        assert list(shapes) == sorted(shapes, key=lambda shape: (shape.column, shape.row))
        assert len({str(shape) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ((), "nothing"),
        ((Shape("orange", "circle"),), "an orange circle"),
        ((Shape("red", "circle", 0, 1), Shape("blue", "square", 2, 0)), "a blue square and a red circle"),
    ],
)
def test_describe_lists_left_to_right(shapes, text):
    assert describe(shapes) == text


def test_describe_joins_three_shapes():
    shapes = [Shape("red", "circle", 1, column) for column in range(3)]

    assert describe(shapes) == "a red circle, a red circle and a red circle"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_shipped_sample_is_what_draw_makes(name):
    with Image.open(sample_path(name)) as shipped:
        assert shipped.tobytes() == SAMPLES[name].draw().tobytes()


def test_no_sample_lies_about_unlisted():
    folder = sample_path("red_circle").parent

    assert {path.stem for path in folder.iterdir()} == set(SAMPLES)


def test_the_prompts_have_pairwise_different_answers_and_sizes_from_64_to_1024():
    answers = [prompt.answer for prompt in PAIRWISE_DIFFERENT]
    widths = [prompt.picture().width for prompt in PAIRWISE_DIFFERENT]

    assert len(set(answers)) == len(answers) >= 10
    assert (min(widths), max(widths)) == (64, 1024)
    assert all(describe(prompt.shapes) == prompt.answer for prompt in PAIRWISE_DIFFERENT if prompt.question == WHAT)
