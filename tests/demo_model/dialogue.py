"""Conversations about scenes: which questions are asked, and the right answers.

Owns answers and the mixture of training. Leaves to others: scenes, sentences, pixels, tokens.

"The picture" without a number is the newest one. Answers about several pictures name them in the order in which they
came: "first: a red circle; second: nothing"; of one picture alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from epd_serve.demo.pictures import COLOURS, KINDS, Shape, describe
from tests.demo_model.scenes import Scene, random_scene
from tests.demo_model.wordings import NUMBERS, ORDINALS, SMALL_TALK, picture_names, varied, wording

Item = TypeVar("Item")

NO_PICTURE = "I do not see a picture."
MOST_PICTURES = 4
PLACES = {
    (0, 0): "at the top left",
    (0, 1): "at the top",
    (0, 2): "at the top right",
    (1, 0): "on the left",
    (1, 1): "in the middle",
    (1, 2): "on the right",
    (2, 0): "at the bottom left",
    (2, 1): "at the bottom",
    (2, 2): "at the bottom right",
}
_COUNTS = ("none", *NUMBERS)
ONE_PICTURE = ("describe", "count", "colour", "shape", "where", "yes or no", "background")
_WEIGHTS = (0.22, 0.10, 0.12, 0.12, 0.20, 0.18, 0.06)
SEVERAL = ("nth", "nth count", "each")
_SEVERAL_WEIGHTS = (0.5, 0.15, 0.35)
_ABOUT_SEVERAL, _AS_IF_SEVERAL = 0.75, 0.05  # share of the tasks of `SEVERAL` with two to four pictures, and with one


@dataclass(frozen=True)
class Turn:
    """A question with the pictures that come with it, and the right answer."""

    question: str
    answer: str
    scenes: tuple[Scene, ...] = field(default=())


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _alone(shapes: tuple[Shape, ...], attribute: str) -> list[Shape]:
    """Shapes whose colour or kind no other has."""
    values = [getattr(shape, attribute) for shape in shapes]
    return [shape for shape in shapes if values.count(getattr(shape, attribute)) == 1]


def _something(chance: np.random.Generator, shape: Shape) -> str:
    """What {a} stands for: mostly a colour and a kind."""
    draw = chance.random()
    if draw < 0.7:
        return _a(str(shape))
    return _a(shape.kind) if draw < 0.85 else f"anything {shape.colour}"


def _is_in(something: str, scene: Scene) -> bool:
    words = something.split()[1:]
    return any(set(words) <= {shape.colour, shape.kind} for shape in scene.shapes)


def _any_shape(chance: np.random.Generator) -> Shape:
    return Shape(list(COLOURS)[int(chance.integers(len(COLOURS)))], KINDS[int(chance.integers(len(KINDS)))])


def _pick(chance: np.random.Generator, items: Sequence[Item]) -> Item:
    return items[int(chance.integers(len(items)))]


def _absent(chance: np.random.Generator, scene: Scene) -> Shape:
    """A shape to ask for in vain: often one that differs from a real one in colour or kind only."""
    other = _any_shape(chance)
    if scene.shapes and chance.random() < 0.6:
        real = _pick(chance, scene.shapes)
        other = Shape(real.colour, other.kind) if chance.random() < 0.5 else Shape(other.colour, real.kind)
    return other


def about_one(chance: np.random.Generator, task: str, scene: Scene, *, unseen: bool) -> tuple[str, str] | None:
    """(question, answer) of a task of `ONE_PICTURE`; None where the scene does not allow it."""
    fields: dict[str, str] = {}
    if task == "describe":
        answer = describe(scene.shapes)
    elif task == "count":
        answer = _COUNTS[len(scene.shapes)]
    elif task == "background":
        answer = scene.background
    elif task == "yes or no":
        wanted = chance.random() < 0.5
        if wanted and not scene.shapes:
            return None
        shape = _pick(chance, scene.shapes) if wanted else _absent(chance, scene)
        fields = {"a": _something(chance, shape)}
        answer = "yes" if _is_in(fields["a"], scene) else "no"
    else:
        attribute = {"colour": "kind", "shape": "colour"}.get(task)
        shapes = _alone(scene.shapes, attribute) if attribute else list(scene.shapes)
        if not shapes:
            return None
        shape = _pick(chance, shapes)
        fields = {"kind": shape.kind, "colour": shape.colour, "name": str(shape)}
        answers = {"colour": shape.colour, "shape": _a(shape.kind), "where": PLACES[shape.row, shape.column]}
        answer = answers[task]
    return wording(chance, task, unseen=unseen).format(**fields), answer


def about_several(
    chance: np.random.Generator, task: str, scenes: tuple[Scene, ...], *, unseen: bool
) -> tuple[str, str]:
    """(question, answer) of a task of `SEVERAL`; there may be only one picture."""
    number = int(chance.integers(len(scenes)))
    scene = scenes[number]
    fields = {"p": _pick(chance, picture_names(number + 1, len(scenes)))}
    if task == "nth":
        answer = describe(scene.shapes)
    elif task == "nth count":
        answer = _COUNTS[len(scene.shapes)]
    else:
        answer = "; ".join(f"{ORDINALS[i]}: {describe(it.shapes)}" for i, it in enumerate(scenes))
    return wording(chance, task, unseen=unseen).format(**fields), answer


def small_talk(chance: np.random.Generator, *, unseen: bool) -> tuple[str, str]:
    answer, seen, kept = _pick(chance, SMALL_TALK)
    return _pick(chance, kept if unseen else seen), answer


def without_picture(chance: np.random.Generator, *, unseen: bool) -> tuple[str, str]:
    """A question about a picture that nobody sent."""
    scenes = tuple(random_scene(chance, evaluation=unseen, size=(224, 224), count=2) for _ in range(MOST_PICTURES))
    while True:
        task = _pick(chance, ("describe", *ONE_PICTURE, *SEVERAL))
        question = (
            about_several(chance, task, scenes, unseen=unseen)
            if task in SEVERAL
            else about_one(chance, task, scenes[0], unseen=unseen)
        )
        if question:
            return question[0], NO_PICTURE


def questions(chance: np.random.Generator, sizes: tuple[tuple[int, int], ...], number: int) -> tuple[Turn, ...]:
    """`number` questions about the same pictures, one per entry of `sizes` (may be none), all sent with the first."""
    scenes = tuple(random_scene(chance, size=size) for size in sizes)
    drawn = [_training_question(chance, scenes) for _ in range(number)]
    return tuple(
        Turn(varied(chance, question), answer, scenes if index == 0 else ())
        for index, (question, answer) in enumerate(drawn)
    )


def conversation(chance: np.random.Generator, sizes: tuple[tuple[int, int], ...], turns: int) -> tuple[Turn, ...]:
    """A conversation of `turns` questions with different answers, where chance finds them.

    In half of them pictures come with any of the turns, the first one seldom late.
    """
    scenes = tuple(random_scene(chance, size=size) for size in sizes)
    arrives = np.zeros(len(scenes), int)
    if chance.random() < 0.5:
        arrives = np.sort(chance.integers(0, turns, len(scenes)))
        if chance.random() < 0.7:
            arrives[:1] = 0
    dialogue: list[Turn] = []
    answered: set[str] = set()
    for index in range(turns):
        seen = scenes[: int((arrives <= index).sum())]
        new = scenes[int((arrives < index).sum()) : len(seen)]
        for _ in range(20):
            question, answer = _training_question(chance, seen)
            if answer not in answered:
                break
        answered.add(answer)
        dialogue.append(Turn(varied(chance, question), answer, new))
    return tuple(dialogue)


def _training_question(chance: np.random.Generator, scenes: tuple[Scene, ...]) -> tuple[str, str]:
    if chance.random() < (0.05 if scenes else 0.5):
        return small_talk(chance, unseen=False)
    if not scenes:
        return without_picture(chance, unseen=False)
    while True:
        turn: tuple[str, str] | None
        if chance.random() < (_ABOUT_SEVERAL if len(scenes) > 1 else _AS_IF_SEVERAL):
            task = str(chance.choice(SEVERAL, p=_SEVERAL_WEIGHTS))
            turn = about_several(chance, task, scenes, unseen=False)
        else:
            task = str(chance.choice(ONE_PICTURE, p=_WEIGHTS))
            turn = about_one(chance, task, scenes[-1], unseen=False)
        if turn:
            return turn
