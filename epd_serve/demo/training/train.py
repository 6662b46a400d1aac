"""Training: first the vision tower alone, then everything on questions and answers.

Owns the stages, the schedule and the loop. Leaves to others: data (`batches`), what is minimised
(`losses`), files (`checkpoints`, `export`).

The schedule counts steps, never time: a run may be stopped for hours, or killed and continued, and gives the same
weights on the same kind of processor, with one thread as the command line has it. The learning rate stays level until
the last part of the second stage, then falls to zero in a line.

Matrices are updated by Muon (https://kellerjordan.github.io/posts/muon), torch's. The weights in the package were made
with other code of the same rule, which rounds differently: training anew gives weights as good, not the same ones.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epd_serve.demo.training import checkpoints, files
from epd_serve.demo.training.architecture import DEMO, Architecture
from epd_serve.demo.training.batches import Batch, dialogue_batch, picture_batch
from epd_serve.demo.training.examination import examination
from epd_serve.demo.training.losses import Heads, dialogue_loss, pictures_loss
from epd_serve.demo.training.network import Network
from epd_serve.demo.training.preview import accuracy
from epd_serve.demo.training.tokenizer import Encoder, build
from epd_serve.errors import ConfigError

_VISION, _DIALOGUE, _LOOK = 1, 2, 3  # which numbers a seed is split into


@dataclass(frozen=True)
class Plan:
    """What decides the weights, and nothing else.

    Attributes:
        vision_steps: of the first stage, `vision_pictures` pictures each.
        dialogue_steps: of the second stage.
        singles_steps: the first of them show one picture per row only.
        falling: share of the second stage in which the learning rate falls.
        rows: rows of a step with one picture (later, and `singles` before that), with two to four, and without.
        randomised: share of the pictures that are drawn as others might draw them.
        auxiliary: weight of the vision tower's own loss in the second stage.
    """

    seed: int = 8
    vision_steps: int = 400
    vision_pictures: int = 32
    dialogue_steps: int = 3000
    singles_steps: int = 200
    falling: float = 0.4
    singles: int = 32
    rows: tuple[int, int, int] = (22, 9, 4)
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


def kept_plan(folder: Path) -> Plan | None:
    """The plan of the folder's checkpoint, None where there is none."""
    kept = checkpoints.load(folder)
    return _plan(kept["plan"], folder) if kept else None


def _plan(written: dict[str, Any], folder: Path) -> Plan:
    if differing := written.keys() ^ {it.name for it in dataclasses.fields(Plan)}:
        raise ConfigError(
            f"{folder} holds the checkpoint of another version of this program, whose plan differs in "
            f"{', '.join(sorted(differing))}: name another folder to start anew",
            param="--out",
        )
    return Plan(**written | {"rows": tuple(written["rows"])})


@dataclass(frozen=True)
class Progress:
    """What one step tells: its number (from 1), losses, the share of right labels or answers, CPU seconds so far."""

    step: int
    loss: float
    auxiliary: float
    right: float
    cpu_s: float
    looked: dict[str, float] | None = None


def _products() -> Any:
    """Products in bfloat16, as they will be when the model is served; on CPUs with AVX512-BF16 four times as fast."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _optimizers(modules: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices; AdamW for embeddings, heads, norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        inner = any(part in name for part in ("blocks.", "layers.", "merger"))
        (matrices if parameter.ndim == 2 and inner else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=plan.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(rest, plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Training:
    """One run in a folder: goes on where the folder's checkpoint ends."""

    def __init__(self, plan: Plan, folder: Path, sizes: Architecture = DEMO) -> None:
        self.plan, self.folder = plan, folder
        self.encoder = Encoder(build())
        self.network = Network(sizes, self.encoder.vocabulary, plan.seed)
        self.heads = Heads(sizes.hidden)
        self._modules = torch.nn.ModuleDict({"network": self.network, "heads": self.heads})
        self._optimizers = _optimizers(self._modules, plan)
        self.step = 0
        self._cpu_before_s = 0.0
        if kept := checkpoints.load(folder):
            self._check(_plan(kept["plan"], folder), kept["step"])
            if kept["tokenizer"] != self.encoder.digest:
                raise ConfigError(
                    f"{folder} was begun with other wordings, so its tokens mean other words: name another folder to "
                    "start anew",
                    param="--out",
                )
            self._modules.load_state_dict(kept["modules"])
            for optimizer, state in zip(self._optimizers, kept["optimizers"], strict=True):
                if state["param_groups"][0].keys() != optimizer.param_groups[0].keys():
                    raise ConfigError(
                        f"{folder} holds the checkpoint of another optimizer: name another folder to start anew",
                        param="--out",
                    )
                optimizer.load_state_dict(state)
            self.step, self._cpu_before_s = kept["step"], kept["cpu_s"]
        self._cpu_began_s = time.process_time()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this run, those before it was continued included."""
        return self._cpu_before_s + time.process_time() - self._cpu_began_s

    def _check(self, then: Plan, step: int) -> None:
        """A run may be made longer or shorter while its learning rate is level; all else has to stay."""
        wanted = dataclasses.asdict(self.plan)
        level = step <= min(then.level_steps, self.plan.level_steps)
        for key, value in dataclasses.asdict(then).items():
            if value != wanted[key] and not (level and key in ("dialogue_steps", "falling")):
                raise ConfigError(
                    f"{self.folder} was begun with {key} = {value}, asked is {wanted[key]}: name another folder to "
                    "start anew, or ask for the same to go on",
                    param="--out",
                )

    def save(self) -> None:
        content = {
            "plan": dataclasses.asdict(self.plan) | {"rows": list(self.plan.rows)},
            "step": self.step,
            "cpu_s": self.cpu_s,
            "tokenizer": self.encoder.digest,
            "modules": self._modules.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        checkpoints.save(self.folder, content)

    def run(self, look_every: int = 0, looks: int = 40, until: int | None = None) -> Iterator[Progress]:
        """Train up to the plan's end, or to step `until`; yields after every step, in which nothing is saved."""
        last = min(self.plan.steps, until or self.plan.steps)
        while self.step < last:
            progress = self._vision_step() if self.step < self.plan.vision_steps else self._dialogue_step()
            if look_every and progress.step > self.plan.vision_steps and progress.step % look_every == 0:
                progress = dataclasses.replace(progress, looked=self.look(looks))
            yield progress

    def look(self, number: int) -> dict[str, float]:
        """Accuracy in this process, `number` questions per task."""
        return accuracy(self.network, self.encoder, examination(number, seed=self.plan.seed + _LOOK))

    def _vision_step(self) -> Progress:
        chance = np.random.default_rng([self.plan.seed, _VISION, self.step])
        pictures = picture_batch(chance, self.plan.vision_pictures, self.plan.randomised)
        with _products():
            loss, right = pictures_loss(self.network, self.heads, pictures)
        loss.backward()
        self._update()
        return Progress(self.step, 0.0, loss.item(), right.min().item(), self.cpu_s)

    def _dialogue_step(self) -> Progress:
        batches = self._batches()
        answers = sum(it.weights.sum() for it in batches)
        with_pictures = sum(bool(it.pictures) for it in batches)
        loss = auxiliary = right = total = 0.0
        for batch in batches:
            with _products():
                batch_loss = dialogue_loss(self.network, self.heads, batch)
            (batch_loss.answers / answers + self.plan.auxiliary * batch_loss.auxiliary / with_pictures).backward()
            loss += batch_loss.answers.item() / float(answers)
            auxiliary += batch_loss.auxiliary.item() / with_pictures
            right, total = right + batch_loss.right.sum().item(), total + len(batch_loss.right)
        self._update()
        return Progress(self.step, loss, auxiliary, right / total, self.cpu_s)

    def _batches(self) -> list[Batch]:
        chance = np.random.default_rng([self.plan.seed, _DIALOGUE, self.step])
        several = int(chance.integers(2, 5))
        one, many, none = self.plan.rows
        if self.step - self.plan.vision_steps < self.plan.singles_steps:
            one, many = self.plan.singles, 0
        wanted = [(one, 1), (many, several), (none, 0)]
        return [
            dialogue_batch(chance, self.encoder, rows, pictures, self.plan.randomised)
            for rows, pictures in wanted
            if rows
        ]

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._modules.parameters(), self.plan.clip)
        pace = self.plan.pace(self.step)
        for optimizer, full in zip(self._optimizers, (self.plan.muon_lr, self.plan.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * pace
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1


def train(
    plan: Plan,
    folder: Path,
    *,
    tell: Callable[[Progress], None],
    stop: Callable[[], bool] = lambda: False,
    save_every: int = 50,
    look_every: int = 200,
) -> Training:
    """Train to the plan's end, or until `stop`, which is asked after each step: half a step is never saved.

    Raises:
        ConfigError: the folder cannot be written, or its checkpoint is another run's.
    """
    files.prepare(folder, "--out")
    training = Training(plan, folder)
    for progress in training.run(look_every):
        tell(progress)
        if stop():
            break
        if training.step % save_every == 0:
            training.save()
    training.save()
    return training
