"""Batches of training: a function of (seed, stage, step) alone, so that a resumed run sees what it would have seen.

Owns which sizes and how many pictures a batch has, and its tensors. Pictures of one place in a batch's conversations
have one size, so that the vision tower runs them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.demo_model.architecture import picture_grid
from tests.demo_model.dialogue import Turn, conversation, questions
from tests.demo_model.raster import Raster, rasterize
from tests.demo_model.scenes import random_scene, random_size
from tests.demo_model.tokenizer import Encoder, Tokens

_BRANCHES = 4  # questions that share the pictures of a batch's row
_BRANCHED = 0.6  # share of the batches


@dataclass(frozen=True)
class Pictures:
    """Pictures of one size.

    Attributes:
        grid: (rows, columns) of patches.
        patches: [pictures, rows * columns, 3 * PATCH * PATCH].
        labels: [pictures, tokens, 3], see `raster.Raster`.
    """

    grid: tuple[int, int]
    patches: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Batch:
    """Conversations, padded on the right.

    Attributes:
        ids: [rows, length].
        positions: [3, rows, length].
        mask: [rows, 1, length, length] or None, see `network.Text`.
        at: [picture tokens]: flat places of picture tokens, in the order of `pictures`.
        predicting: [answer tokens]: flat places whose next token is an answer's.
        answers: [answer tokens]: those tokens.
        answer_of: [answer tokens]: number of the answer, counted through the batch.
        weights: [answer tokens]: what each counts: an answer counts by the root of its length.
        pictures: one entry per place of a picture in the conversations.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    at: Tensor
    predicting: Tensor
    answers: Tensor
    answer_of: Tensor
    weights: Tensor
    pictures: tuple[Pictures, ...]


def pictures_of(rasters: Sequence[Raster], grid: tuple[int, int]) -> Pictures:
    patches = torch.from_numpy(np.stack([raster.patches for raster in rasters]))
    return Pictures(grid, patches, torch.from_numpy(np.stack([raster.labels for raster in rasters])))


def _sizes_like(chance: np.random.Generator, size: tuple[int, int], number: int) -> list[tuple[int, int]]:
    """Sizes that the processor turns into the grid of `size`: the same shape, small and large."""
    sizes: list[tuple[int, int]] = []
    while len(sizes) < number:
        scale = 64 / min(size) if chance.random() < 0.1 else float(np.exp(chance.uniform(-0.7, 0.7)))
        other = (max(48, round(size[0] * scale)), max(48, round(size[1] * scale)))
        sizes.append(other if picture_grid(*other) == picture_grid(*size) else size)
    return sizes


def picture_batch(chance: np.random.Generator, number: int, randomised: float = 0.0) -> Pictures:
    """Pictures alone, of one size."""
    size = random_size(chance)
    scenes = [random_scene(chance, size=it) for it in _sizes_like(chance, size, number)]
    return pictures_of([rasterize(scene, chance, randomised) for scene in scenes], picture_grid(*size))


def dialogue_batch(
    chance: np.random.Generator,
    encoder: Encoder,
    rows: int,
    pictures: int,
    randomised: float = 0.0,
    most_turns: int = 10,
) -> Batch:
    """Questions about `pictures` pictures per row: a batch of single questions, or one of conversations of 2 turns to
    `most_turns`.
    """
    sizes = [_sizes_like(chance, random_size(chance), rows) for _ in range(pictures)]
    per_row = [tuple(place[row] for place in sizes) for row in range(rows)]
    branched = chance.random() < _BRANCHED
    make, turns = (questions, _BRANCHES) if branched else (conversation, int(chance.integers(2, most_turns + 1)))
    dialogues = [make(chance, row, turns) for row in per_row]
    return batch_of(dialogues, encoder, branched=branched, chance=chance, randomised=randomised)


def batch_of(
    dialogues: Sequence[tuple[Turn, ...]],
    encoder: Encoder,
    *,
    branched: bool = False,
    chance: np.random.Generator | None = None,
    randomised: float = 0.0,
    rasters: Sequence[Sequence[Raster]] | None = None,
) -> Batch:
    """Tensors of conversations that have as many pictures each, those of one place of one grid.

    Args:
        dialogues: rows.
        encoder: makes the tokens.
        branched: see `Encoder.dialogue`.
        chance, randomised: let drawings vary, see `rasterize`.
        rasters: pictures drawn already, per row; drawn here when None.
    """
    tokens = [encoder.dialogue(turns, branched=branched) for turns in dialogues]
    length = max(len(it.ids) for it in tokens)
    ids = torch.zeros(len(tokens), length, dtype=torch.long)
    positions = torch.zeros(len(tokens), length, 3, dtype=torch.long)
    branch = torch.zeros(len(tokens), length, dtype=torch.long)
    is_answer = torch.zeros(len(tokens), length, dtype=torch.bool)
    for row, it in enumerate(tokens):
        used = len(it.ids)
        ids[row, :used] = torch.tensor(it.ids)
        positions[row, :used] = torch.tensor(it.positions)
        branch[row, :used] = torch.tensor(it.branch)
        is_answer[row, :used] = torch.tensor(it.is_answer)
    answers = is_answer.flatten().nonzero()[:, 0]
    scenes = [[scene for turn in turns for scene in turn.scenes] for turns in dialogues]
    groups = []
    for place in range(len(scenes[0])):
        drawn = [
            rasters[row][place] if rasters else rasterize(it[place], chance, randomised)
            for row, it in enumerate(scenes)
        ]
        groups.append(pictures_of(drawn, picture_grid(*scenes[0][place].size)))
    numbers = _numbers(tokens)
    return Batch(
        ids,
        positions.permute(2, 0, 1).contiguous(),
        _mask(branch) if branched else None,
        _picture_places(ids == encoder.ids["<|image_pad|>"], groups),
        answers - 1,
        ids.flatten()[answers],
        numbers,
        (torch.bincount(numbers).float() ** -0.5)[numbers],
        tuple(groups),
    )


def _mask(branch: Tensor) -> Tensor:
    same = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == 0)
    return (same & torch.ones(branch.shape[1], branch.shape[1], dtype=torch.bool).tril())[:, None]


def _picture_places(is_picture: Tensor, groups: Sequence[Pictures]) -> Tensor:
    """Flat places of picture tokens, all rows' first pictures first."""
    places = [row.nonzero()[:, 0] + number * is_picture.shape[1] for number, row in enumerate(is_picture)]
    lengths = [group.labels.shape[1] for group in groups]
    split = [row.split(lengths) for row in places] if lengths else []
    return torch.cat([row[place] for place in range(len(groups)) for row in split]) if split else torch.zeros(0).long()


def _numbers(tokens: Sequence[Tokens]) -> Tensor:
    """Which answer each answer token belongs to."""
    numbers: list[int] = []
    number = -1
    for it in tokens:
        before = False
        for says in it.is_answer:
            number += says and not before
            if says:
                numbers.append(number)
            before = says
    return torch.tensor(numbers)
