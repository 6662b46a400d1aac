"""Accuracy of the network in this process, while it trains: the evaluation's questions, drawn as `pictures.draw` draws,
or those about foreign pictures.

A look, not the evaluation: float32, pictures resized by PIL, and a second turn sees the right first answer.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from epd_serve.demo import pictures
from tests.demo_model.architecture import picture_grid
from tests.demo_model.batches import batch_of
from tests.demo_model.dialogue import conversation
from tests.demo_model.examination import Question
from tests.demo_model.losses import Heads, dialogue_loss
from tests.demo_model.network import Network
from tests.demo_model.raster import Raster, from_picture
from tests.demo_model.scenes import Scene
from tests.demo_model.tokenizer import Encoder


def drawn(scene: Scene) -> Raster:
    if scene.file is not None:
        return from_picture(Image.open(io.BytesIO(scene.file)))
    return from_picture(pictures.draw(scene.shapes, scene.size, scene.background))


@torch.no_grad()
def accuracy(network: Network, encoder: Encoder, questions: Sequence[Question]) -> dict[str, float]:
    """Share of right last answers, per task."""
    heads = Heads(network.lm_head.in_features)  # their loss is of no interest here
    groups: dict[tuple[object, ...], list[Question]] = defaultdict(list)
    for it in questions:
        grids = [picture_grid(*scene.size) for turn in it.turns for scene in turn.scenes]
        groups[(len(it.turns), *grids)].append(it)
    right: dict[str, list[bool]] = defaultdict(list)
    for group in groups.values():
        rasters = [[drawn(scene) for turn in it.turns for scene in turn.scenes] for it in group]
        batch = batch_of([it.turns for it in group], encoder, rasters=rasters)
        answers_right = dialogue_loss(network, heads, batch).right.view(len(group), -1)[:, -1]
        for it, correct in zip(group, answers_right.tolist(), strict=True):
            right[it.task].append(correct)
    return {task: sum(answers) / len(answers) for task, answers in right.items()}


@torch.no_grad()
def conversations(network: Network, encoder: Encoder, number: int, turns: int, seed: int) -> tuple[float, list[float]]:
    """How the network holds on through long conversations about one to three pictures, in training's wordings.

    Returns:
        The share of right answers and, per answer, the least by which the logit of a token of it is above the
        second best's: rounding may turn a near tie.
    """
    right, margins = [], []
    for index in range(number):
        chance = np.random.default_rng([seed, index])
        talk = conversation(chance, ((224, 224),) * int(chance.integers(1, 4)), turns)
        rasters = [[drawn(scene) for turn in talk for scene in turn.scenes]]
        batch = batch_of([talk], encoder, rasters=rasters)
        found = dialogue_loss(network, Heads(network.lm_head.in_features), batch)
        right += found.right.tolist()
        margins += [float(found.margins[batch.answer_of == it].min()) for it in range(len(found.right))]
    return sum(right) / len(right), margins
