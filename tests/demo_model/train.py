"""Training: first the vision tower alone, then everything on questions and answers.

Owns the stages, the schedule and the loop. Leaves to others: data (`batches`), what is minimised
(`losses`), files (`checkpoints`, `export`).

The schedule counts steps, never time: a run may be stopped for hours, or killed and continued, in one process or two,
and gives the same weights on the same kind of processor, with one thread each as the command line has it. The learning
rate stays level until the last part of the second stage, then falls to zero in a line.

A training may go on from the weights of another (`begun_from`): the network alone, with new heads and momenta.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epd_serve.errors import ConfigError
from tests.demo_model import checkpoints, files
from tests.demo_model.architecture import DEMO, Architecture
from tests.demo_model.examination import examination
from tests.demo_model.export import begin_with
from tests.demo_model.losses import Heads
from tests.demo_model.muon import Muon
from tests.demo_model.network import Network
from tests.demo_model.parts import parts, work_out
from tests.demo_model.plan import Plan
from tests.demo_model.preview import accuracy
from tests.demo_model.second import Second
from tests.demo_model.tokenizer import Encoder, build

_LOOK = 3  # added to the seed: other questions than the card's


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


def _optimizers(modules: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices; AdamW for embeddings, heads, norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        inner = any(part in name for part in ("blocks.", "layers.", "merger"))
        (matrices if parameter.ndim == 2 and inner else rest).append(parameter)
    return [
        Muon(matrices, plan.muon_lr),
        torch.optim.AdamW(rest, plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Training:
    """One run in a folder: goes on where the folder's checkpoint ends."""

    def __init__(self, plan: Plan, folder: Path, sizes: Architecture = DEMO, begin: Path | None = None) -> None:
        self.plan, self.folder = plan, folder
        self.encoder = Encoder(build())
        self.network = Network(sizes, self.encoder.vocabulary, plan.seed)
        self.heads = Heads(sizes.hidden)
        self._modules = torch.nn.ModuleDict({"network": self.network, "heads": self.heads})
        self._optimizers = _optimizers(self._modules, plan)
        self.step = 0
        self.before: dict[str, Any] = {}  # what training.json of the model says that this goes on from
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
            self.step, self._cpu_before_s, self.before = kept["step"], kept["cpu_s"], kept["before"]
        elif begin:
            self.before = begin_with(self.network, self.encoder, begin)
        self._cpu_began_s, self._second_s = time.process_time(), 0.0

    def second(self) -> Second:
        """A process that takes a part of every step, for `run`."""
        return Second(self._modules, self.plan)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this run, those before it was continued included."""
        return self._cpu_before_s + time.process_time() - self._cpu_began_s + self._second_s

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
            "before": self.before,
            "tokenizer": self.encoder.digest,
            "modules": self._modules.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        checkpoints.save(self.folder, content)

    def run(
        self, look_every: int = 0, looks: int = 40, until: int | None = None, second: Second | None = None
    ) -> Iterator[Progress]:
        """Train up to the plan's end, or to step `until`; yields after every step, in which nothing is saved."""
        last = min(self.plan.steps, until or self.plan.steps)
        while self.step < last:
            progress = self._work_out(second)
            if look_every and progress.step > self.plan.vision_steps and progress.step % look_every == 0:
                progress = dataclasses.replace(progress, looked=self.look(looks))
            yield progress

    def look(self, number: int) -> dict[str, float]:
        """Accuracy in this process, `number` questions per task."""
        return accuracy(self.network, self.encoder, examination(number, seed=self.plan.seed + _LOOK))

    def _work_out(self, second: Second | None) -> Progress:
        if second:
            second.begin(self.step)
        others = range(1, len(parts(self.plan, self.step)))
        found = [work_out(self._modules, self.encoder, self.plan, self.step, number) for number in others]
        first = second.end() if second else work_out(self._modules, self.encoder, self.plan, self.step, 0)
        found.append(first)
        if second:
            self._second_s = second.cpu_s
        self._update()
        seen = [it.auxiliary for it in found if it.auxiliary]
        right = sum(it.right for it in found if it.answers) / sum(it.answers for it in found)
        return Progress(self.step, sum(it.loss for it in found), sum(seen) / len(seen), right, self.cpu_s)

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
    begin: Path | None = None,
    two: bool = False,
    tell: Callable[[Progress], None],
    stop: Callable[[], bool] = lambda: False,
    save_every: int = 50,
    look_every: int = 200,
) -> Training:
    """Train to the plan's end, or until `stop`, which is asked after each step: half a step is never saved.

    Args:
        plan: what is trained.
        folder: of its checkpoint.
        begin: model folder that it goes on from, where the plan says so (`begun_from`).
        two: in two processes; the weights are the same.
        tell: is told of every step.
        stop: see above.
        save_every, look_every: steps.

    Raises:
        ConfigError: the folder cannot be written, or its checkpoint is another run's.
    """
    files.prepare(folder, "--out")
    training = Training(plan, folder, begin=begin)
    with training.second() if two else contextlib.nullcontext() as second:
        for progress in training.run(look_every, second=second):
            tell(progress)
            if stop():
                break
            if training.step % save_every == 0:
                training.save()
    training.save()
    return training
