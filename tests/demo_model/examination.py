"""The questions of the evaluation: unseen scenes in unseen wordings, the same for every way of asking them.

Owns the tasks and their making from a seed. Leaves to others: asking (`evaluation`, `preview`), scoring.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from tests.demo_model.dialogue import (
    MOST_PICTURES,
    ONE_PICTURE,
    SEVERAL,
    Turn,
    about_one,
    about_several,
    small_talk,
    without_picture,
)
from tests.demo_model.scenes import random_scene

WITHOUT_PICTURE = ("small talk", "no picture")
TASKS = (*ONE_PICTURE, *SEVERAL, "second turn", *WITHOUT_PICTURE)


@dataclass(frozen=True)
class Question:
    """One item: the last turn's answer counts, turns before it only lead there."""

    task: str
    turns: tuple[Turn, ...]

    @property
    def answer(self) -> str:
        return self.turns[-1].answer


def question(task: str, number: int, seed: int) -> Question:
    """Item `number` of a task; the same (task, number, seed) give the same item."""
    chance = np.random.default_rng([seed, zlib.crc32(task.encode()), number])
    while True:
        if task == "small talk":
            return Question(task, (Turn(*small_talk(chance, unseen=True)),))
        if task == "no picture":
            return Question(task, (Turn(*without_picture(chance, unseen=True)),))
        if task in SEVERAL:
            scenes = tuple(random_scene(chance, evaluation=True) for _ in range(chance.integers(2, MOST_PICTURES + 1)))
            return Question(task, (Turn(*about_several(chance, task, scenes, unseen=True), scenes),))
        scene = random_scene(chance, evaluation=True)
        if task != "second turn":
            if turn := about_one(chance, task, scene, unseen=True):
                return Question(task, (Turn(*turn, (scene,)),))
            continue
        tasks = chance.choice(ONE_PICTURE, 2, replace=False)
        both = [about_one(chance, str(it), scene, unseen=True) for it in tasks]
        if both[0] and both[1]:
            return Question(task, (Turn(*both[0], (scene,)), Turn(*both[1])))


def examination(number: int, seed: int, tasks: tuple[str, ...] = TASKS) -> list[Question]:
    """`number` items of each task."""
    return [question(task, index, seed) for task in tasks for index in range(number)]
