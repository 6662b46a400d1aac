"""`python -m tests.demo_model COMMAND`: train, export, look, evaluate, card.

Owns the command line and the progress bars.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from epd_serve.errors import EpdError

if TYPE_CHECKING:  # torch takes seconds to import, and `evaluate` and `card` need none
    from tests.demo_model.train import Training

EVALUATION_SEED = 2026
_FOREIGN = "ask about pictures that other code drew instead"
_NEAR = 0.5  # between two logits: what bfloat16 may turn
_ENDS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0, 1 when a part failed, 2 when the input is wrong, 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except EpdError as error:
        print(f"{error.param}: {error}" if error.param else f"{error}", file=sys.stderr)
        return 2 if error.param else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _whole(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from `least`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        return number

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.demo_model", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "train", help="train, or go on where the folder's checkpoint ends; then write the model"
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoint, training.json, model/")
    command.add_argument(
        "--from",
        dest="begin",
        type=Path,
        metavar="MODEL",
        help="go on from the weights of this model folder, by a plan of its own",
    )
    command.add_argument("--seed", type=_whole(0), metavar="N", help="another model; the built-in one has the default")
    command.add_argument("--quick", action="store_true", help="a few steps: the whole path, and no useful model")
    command.set_defaults(command=_train)

    command = commands.add_parser("export", help="write the model folder of a checkpoint, finished or not")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the training")
    command.add_argument("--model", type=Path, required=True, metavar="DIR", help="a new folder")
    command.set_defaults(command=_export)

    command = commands.add_parser("look", help="accuracy of a checkpoint in this process: fast, float32, no server")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the training")
    command.add_argument("--number", type=_whole(1), default=100, metavar="N", help="questions per task")
    command.add_argument("--foreign", action="store_true", help=_FOREIGN)
    command.set_defaults(command=_look)

    command = commands.add_parser("evaluate", help="accuracy of a served model, which is what the model card states")
    command.add_argument("--url", required=True, help="an OpenAI endpoint over the model")
    command.add_argument("--served-as", required=True, metavar="TEXT", help="how, for the card: TP1, (E-P)-D")
    command.add_argument("--json", type=Path, required=True, metavar="FILE", help="the result, with every answer")
    command.add_argument("--number", type=_whole(1), default=500, metavar="N", help="questions per task")
    command.add_argument("--at-once", type=_whole(1), default=4, metavar="N", help="requests in flight")
    command.add_argument("--task", action="append", default=[], help="this one only; may be repeated")
    command.add_argument("--foreign", action="store_true", help=_FOREIGN)
    command.set_defaults(command=_evaluate)

    command = commands.add_parser("card", help="write the model card from results of evaluate")
    command.add_argument("model", type=Path, metavar="MODEL")
    command.add_argument(
        "results", type=Path, nargs="+", metavar="RESULT", help="of evaluate, about the same questions"
    )
    command.add_argument(
        "--foreign", type=Path, action="append", required=True, metavar="RESULT", help="of evaluate --foreign"
    )
    command.set_defaults(command=_card)
    return parser


def _bar(text: str) -> Progress:
    columns = (
        TextColumn(text),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=2)


def _stop_on_signal() -> Callable[[], bool]:
    """From now on the first Ctrl-C or SIGTERM only asks for an end, which the function tells; a second one ends."""
    requested = threading.Event()

    def request(number: int, frame: FrameType | None) -> None:
        requested.set()
        for one in _ENDS:
            signal.signal(one, signal.default_int_handler)

    for number in _ENDS:
        signal.signal(number, request)
    return requested.is_set


def _train(arguments: argparse.Namespace) -> int:
    import torch

    from tests.demo_model import second, train
    from tests.demo_model.export import weights_digest
    from tests.demo_model.plan import FURTHER, QUICK, Plan

    torch.set_num_threads(1)  # more of them sum in another order: other weights
    plan = QUICK if arguments.quick else FURTHER if arguments.begin else Plan()
    if arguments.begin:
        plan = dataclasses.replace(plan, begun_from=weights_digest(arguments.begin))
    if arguments.seed is not None:
        plan = dataclasses.replace(plan, seed=arguments.seed)
    stop = _stop_on_signal()
    with _bar("training") as bar:
        bar_task = bar.add_task("", total=plan.steps, note="")

        def tell(progress: train.Progress) -> None:
            note = f"loss {progress.loss:.3f}, vision {progress.auxiliary:.3f}, right {progress.right:.0%}"
            bar.update(bar_task, completed=progress.step, note=note)
            if progress.looked or (progress.step % 25 == 0 and not bar.console.is_terminal):
                shares = "; " + ", ".join(f"{task} {share:.0%}" for task, share in (progress.looked or {}).items())
                bar.console.print(f"step {progress.step}, {progress.cpu_s:.0f} CPU s: {note}{shares}", soft_wrap=True)

        done = train.train(plan, arguments.out, begin=arguments.begin, two=second.useful(), tell=tell, stop=stop)
    if done.step < plan.steps:
        print(f"stopped after step {done.step} of {plan.steps}; the same command goes on from there", file=sys.stderr)
        return 130
    _write_model(done, arguments.out / "model", replace=True)
    print(f"{arguments.out / 'model'}: {plan.steps} steps, {done.cpu_s:.0f} CPU seconds")
    return 0


def _write_model(training: Training, model: Path, *, replace: bool = False) -> None:
    from tests.demo_model.export import export

    about: dict[str, Any] = {
        "plan": dataclasses.asdict(training.plan),
        "step": training.step,
        "cpu_s": round(training.cpu_s, 1),
    }
    if training.before:
        about["before"] = training.before
    export(training.network, training.encoder, model, about, replace=replace)


def _loaded(out: Path) -> Training:
    from epd_serve.errors import ConfigError
    from tests.demo_model.train import Training, kept_plan

    plan = kept_plan(out)
    if plan is None:
        raise ConfigError(f"{out} has no checkpoint: train first", param="--out")
    return Training(plan, out)


def _export(arguments: argparse.Namespace) -> int:
    training = _loaded(arguments.out)
    _write_model(training, arguments.model)
    print(f"{arguments.model}: after {training.step} of {training.plan.steps} steps")
    return 0


def _look(arguments: argparse.Namespace) -> int:
    import torch

    from tests.demo_model.foreign.generators import questions as foreign_questions
    from tests.demo_model.preview import accuracy, conversations

    torch.set_num_threads(1)
    training = _loaded(arguments.out)
    print(f"after {training.step} of {training.plan.steps} steps, {training.cpu_s:.0f} CPU seconds")
    if arguments.foreign:
        found = accuracy(training.network, training.encoder, foreign_questions(arguments.number, EVALUATION_SEED))
    else:
        found = training.look(arguments.number)
    for task, share in found.items():
        print(f"{task:17} {share:.1%}")
    if not arguments.foreign:
        turns = training.plan.turns
        share, margins = conversations(training.network, training.encoder, arguments.number, turns, EVALUATION_SEED)
        near = sum(it < _NEAR for it in margins) / len(margins)
        print(f"in {turns} turns {share:9.1%}, near ties {near:.2%} of {len(margins)} answers")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from epd_serve.errors import ConfigError
    from tests.demo_model import evaluation, examination
    from tests.demo_model.foreign import generators

    tasks = generators.TASKS if arguments.foreign else examination.TASKS
    if unknown := set(arguments.task) - set(tasks):
        raise ConfigError(f"unknown task {sorted(unknown)[0]!r}: one of {', '.join(tasks)}", param="--task")
    evaluation.check_writable(arguments.json)
    wanted = tuple(dict.fromkeys(arguments.task)) or tasks
    make = generators.questions if arguments.foreign else examination.examination
    questions = make(arguments.number, EVALUATION_SEED, wanted)
    with _bar("evaluating") as bar:
        bar_task = bar.add_task("", total=len(questions), note="")
        answers = evaluation.ask_all(
            arguments.url,
            questions,
            at_once=arguments.at_once,
            tell=lambda number: bar.update(bar_task, completed=number),
        )
    about = {"served_as": arguments.served_as, "per_task": arguments.number, "seed": EVALUATION_SEED}
    evaluation.write(arguments.json, answers, about)
    for task, share in evaluation.accuracy(answers).items():
        print(f"{task:17} {share:.1%}")
    return 0


def _card(arguments: argparse.Namespace) -> int:
    from tests.demo_model import card, results
    from tests.demo_model.foreign import generators

    loaded = [results.read(path) for path in arguments.results]
    card.write(arguments.model, loaded, [results.read(path, generators.TASKS) for path in arguments.foreign])
    print(arguments.model / card.NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
