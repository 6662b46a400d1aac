"""The plan of a training: what decides the weights, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What decides the weights.

    Attributes:
        begun_from: SHA-256 of the weights that it goes on from; empty: from nothing.
        vision_steps: of the first stage, `vision_pictures` pictures each.
        dialogue_steps: of the second stage.
        singles_steps: the first of them show one picture per row only.
        falling: share of the second stage in which the learning rate falls.
        rows: rows of a step with one picture (later, and `singles` before that), with two to four, and without.
        more_pictures: pictures of a step of the second stage that the vision tower alone is shown.
        turns: the most of a conversation.
        randomised: share of the pictures that are drawn as others might draw them.
        auxiliary: weight of the vision tower's own loss in the second stage.
    """

    seed: int = 8
    begun_from: str = ""
    vision_steps: int = 400
    vision_pictures: int = 32
    dialogue_steps: int = 3000
    singles_steps: int = 200
    falling: float = 0.4
    singles: int = 32
    rows: tuple[int, int, int] = (22, 9, 4)
    more_pictures: int = 0
    turns: int = 10
    randomised: float = 0.6
    auxiliary: float = 0.5
    muon_lr: float = 5e-3
    adam_lr: float = 2e-3
    warm_up: int = 30
    clip: float = 1.0

    @property
    def steps(self) -> int:
        return self.vision_steps + self.dialogue_steps

    @property
    def level_steps(self) -> int:
        """Steps before the learning rate falls."""
        return self.steps - math.ceil(self.falling * self.dialogue_steps)

    def pace(self, step: int) -> float:
        """Share of the full learning rate at a step, 0 … 1."""
        stage_step = step if step < self.vision_steps else step - self.vision_steps
        left = (self.steps - step) / max(1, self.steps - self.level_steps)
        return min(1.0, (stage_step + 1) / self.warm_up, left)


QUICK = Plan(vision_steps=2, vision_pictures=4, dialogue_steps=3, singles_steps=1, singles=2, rows=(2, 1, 1))
# Of a model that is trained already: no stage of its own for the vision tower, and smaller steps.
FURTHER = Plan(
    seed=9,
    vision_steps=0,
    dialogue_steps=1500,
    singles_steps=0,
    falling=0.6,
    rows=(20, 8, 3),
    more_pictures=10,
    randomised=0.75,
    muon_lr=3e-3,
    adam_lr=1e-3,
    warm_up=30,
)
