"""The parts of a training step: batches that are drawn and worked out each for itself, by whichever process.

Owns which parts a step has and the gradients of each. A part is a function of (seed, step, its number) and the weights,
so the sum of all gradients is the same whoever works a part out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.demo_model.batches import dialogue_batch, picture_batch
from tests.demo_model.losses import dialogue_loss, pictures_loss
from tests.demo_model.plan import Plan
from tests.demo_model.tokenizer import Encoder


@dataclass(frozen=True)
class Part:
    """Conversations about `pictures` pictures each; without rows: pictures for the vision tower alone."""

    rows: int
    pictures: int


@dataclass(frozen=True)
class Outcome:
    """Of one part: losses, and how many of its answers (or labels) are right."""

    loss: float
    auxiliary: float
    right: float
    answers: int


def parts(plan: Plan, step: int) -> list[Part]:
    """The parts of a step. The first takes about as long as all others."""
    if step < plan.vision_steps:
        half = plan.vision_pictures // 2
        return [Part(0, half), Part(0, plan.vision_pictures - half)]
    several = int(np.random.default_rng([plan.seed, step]).integers(2, 5))
    one, many, none = plan.rows
    if step - plan.vision_steps < plan.singles_steps:
        one, many = plan.singles, 0
    wanted = (Part(one, 1), Part(many, several), Part(none, 0))
    more = [Part(0, plan.more_pictures)] if plan.more_pictures else []
    return [it for it in wanted if it.rows] + more


def _products() -> Any:
    """Products in bfloat16, as when the model is served, where the processor has AVX512-BF16: four times as fast. Where
    it has not they are far slower than in float32.
    """
    fast = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast)


def work_out(modules: torch.nn.ModuleDict, encoder: Encoder, plan: Plan, step: int, number: int) -> Outcome:
    """Add the gradients of part `number` to those of `modules` (network and heads)."""
    network: Any = modules["network"]
    heads: Any = modules["heads"]
    all_parts = parts(plan, step)
    part = all_parts[number]
    chance = np.random.default_rng([plan.seed, step, number])
    auxiliary_share = 1 / sum(it.pictures > 0 for it in all_parts)
    if step >= plan.vision_steps:
        auxiliary_share *= plan.auxiliary
    if not part.rows:
        pictures = picture_batch(chance, part.pictures, plan.randomised)
        with _products():
            loss, right = pictures_loss(network, heads, pictures)
        (auxiliary_share * loss).backward()
        return Outcome(0.0, loss.item(), right.min().item(), 0 if step >= plan.vision_steps else 1)
    batch = dialogue_batch(chance, encoder, part.rows, part.pictures, randomised=plan.randomised, most_turns=plan.turns)
    with _products():
        found = dialogue_loss(network, heads, batch)
    share = part.rows / sum(it.rows for it in all_parts)
    answers = found.answers / batch.weights.sum()
    (share * answers + auxiliary_share * found.auxiliary).backward()
    return Outcome(share * answers.item(), found.auxiliary.item(), float(found.right.sum()), len(found.right))
