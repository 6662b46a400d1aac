"""Pictures that other code drew: they show what their answers say, and nothing of them is in training."""

from __future__ import annotations

import ast
import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("matplotlib")
pytest.importorskip("cv2")

from epd_serve.demo.pictures import describe
from tests.demo_model.evaluation import picture_url
from tests.demo_model.foreign import browser, generators
from tests.demo_model.foreign.sketches import corners, sketch
from tests.demo_model.placement import Place
from tests.demo_model.scenes import Scene


def shown(scene: Scene) -> Image.Image:
    assert scene.file is not None
    return Image.open(io.BytesIO(scene.file))


@pytest.mark.parametrize("task", generators.TASKS)
def test_every_generator_draws_what_the_answer_says(task):
    """So many shapes, and in the picture's pixels the colours of the answer and no other one."""
    hues = {
        "red": (345, 14),
        "orange": (14, 43),
        "yellow": (43, 66),
        "green": (80, 170),
        "blue": (195, 248),
        "purple": (252, 312),
    }
    for question in generators.questions(3, 7, (task,)):
        (scene,) = question.turns[0].scenes
        pixels = np.asarray(shown(scene).convert("HSV")).reshape(-1, 3).astype(float)
        found = {}
        for colour, (low, high) in hues.items():
            angle = pixels[:, 0] / 255 * 360
            inside = (angle >= low) & (angle < high) if low < high else (angle >= low) | (angle < high)
            found[colour] = (inside & (pixels[:, 1] > 90) & (pixels[:, 2] > 60)).mean()
        assert question.answer == describe(scene.shapes)
        assert shown(scene).size == scene.size
        assert len(scene.shapes) == 1 + ["one", "two", "three"].index(task.split(", ")[1])
        assert all(found[shape.colour] > 0.003 for shape in scene.shapes), (question.answer, found)


def test_the_questions_are_fixed_by_their_seed():
    task = ("pil, two",)

    assert generators.questions(2, 1, task) == generators.questions(3, 1, task)[:2] != generators.questions(2, 2, task)


def test_the_browsers_pictures_are_all_there_and_small():
    for generator in ("canvas", "svg"):
        for shapes in (1, 2, 3):
            scenes = browser.kept(generator, shapes)
            assert len(scenes) == 40 and len({scene.file for scene in scenes}) == 40
            assert all(shown(scene).size == scene.size for scene in scenes)
    assert browser.KEPT.stat().st_size <= 300_000


def test_no_module_of_training_draws_with_what_the_evaluation_draws_with():
    """They import `foreign` nowhere but for evaluating, and none of its libraries."""
    folder = Path(__file__).parent
    users = set()
    for path in set(folder.glob("*.py")) - set(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [it.name for it in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if any(word in f"{module} {name}" for name in names for word in ("foreign", "cv2", "matplotlib")):
                users.add(path.stem)

    assert users == {"__main__", "card"}


def test_a_foreign_picture_is_sent_as_the_file_that_it_is():
    (question,) = generators.questions(1, 3, ("photo, one",))
    (scene,) = question.turns[0].scenes
    kind, data = picture_url(scene).split(";base64,")

    assert kind == "data:image/jpeg" and base64.b64decode(data) == scene.file


def test_corners_turn_around_their_place():
    place = Place(10, 20, 5)

    for kind, number in (("square", 4), ("triangle", 3)):
        for turn in (0.0, 0.3):
            points = np.array(corners(kind, place, turn))
            assert points.shape == (number, 2)
            assert np.hypot(*(points - [10, 20]).T).max() < 5 * 1.32
    assert np.array(corners("square", place, 0.1)).mean(axis=0) == pytest.approx([10, 20])


def test_a_small_sketch_is_no_larger_than_the_kept_pictures():
    sizes = [sketch(np.random.default_rng(seed), 2, small=True).size for seed in range(60)]

    assert max(map(min, sizes)) <= 240


def test_the_page_that_draws_names_every_colour_once():
    page = Path(browser.__file__).with_name("browser.html").read_text(encoding="utf-8")
    chance = np.random.default_rng(0)
    described = browser._described("svg", sketch(chance, 3), chance)

    assert page.count("SKETCHES") == 1
    assert json.loads(json.dumps(described))["file"].startswith("image/")
    assert all(f"  {shape['colour']}: [" in page for shape in described["shapes"])
