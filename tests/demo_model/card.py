"""The model card beside the weights: what the model can do and how well, from the evaluation's own files.

Owns its text. Every number in it is read or counted: accuracy from results of `evaluate`, sizes from the weights'
header, amounts of training from `training.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epd_serve.demo.pictures import BACKGROUNDS, COLOURS, KINDS
from epd_serve.errors import ConfigError
from tests.demo_model import files
from tests.demo_model.architecture import DEMO, FACTOR, MAX_PIXELS, MIN_PIXELS, TRAINING
from tests.demo_model.dialogue import ONE_PICTURE, SEVERAL
from tests.demo_model.eval_templates import EVAL_TEMPLATES
from tests.demo_model.evaluation import share
from tests.demo_model.foreign.generators import GENERATORS, MOST_SHAPES, task
from tests.demo_model.results import Result, alike, commonest, different, interval, split
from tests.demo_model.scenes import HELD_OUT_OF
from tests.demo_model.train_templates import TRAIN_TEMPLATES
from tests.demo_model.wordings import NUMBERS, SMALL_TALK

NAME = "MODEL_CARD.md"
_WEIGHTS = "model.safetensors"
_ABOUT = {
    "describe": "What is in the picture?",
    "count": "How many shapes are there?",
    "colour": "What colour is the circle?",
    "shape": "What shape is red?",
    "where": "Where is the red circle?",
    "yes or no": "Is there a red circle?",
    "background": "What colour is the background?",
    "nth": "What is in the second picture? (of 2 to 4)",
    "nth count": "How many shapes are in picture 3? (of 2 to 4)",
    "each": "Describe each picture. (2 to 4)",
    "second turn": "a second question about the same picture",
    "small talk": "Hello; Who are you?; Thanks",
    "no picture": "a question about pictures that nobody sent",
}
_GOALS = dict.fromkeys(_ABOUT, 0.95) | dict.fromkeys(("describe", "count", "colour", "shape"), 0.97)
_SMALL, _LARGE = 64, 3840  # pixels
_COMMANDS = (
    "```console",
    "$ python -m tests.demo_model train --out DIR",
    "$ epd-serve serve DIR/model --layout TP1    # then the same with another layout",
    "$ python -m tests.demo_model evaluate --url http://127.0.0.1:8000 --served-as TP1 --json TP1.json",
    "$ python -m tests.demo_model evaluate --foreign --url … --served-as TP1 --json TP1-foreign.json",
    "$ python -m tests.demo_model card DIR/model TP1.json OTHER.json --foreign TP1-foreign.json",
    "```",
)
_FURTHER_COMMANDS = (*_COMMANDS[:1], f"{_COMMANDS[1]} --from MODEL    # the weights named above", *_COMMANDS[2:])


def write(model: Path, results: Sequence[Result], others: Sequence[Result]) -> None:
    """Write the card into the model's folder, whole or not at all.

    Args:
        model: the folder.
        results: of `evaluate`, one per way of serving.
        others: the same of `evaluate --foreign`.

    Raises:
        ConfigError: no model that `train` or `export` wrote, or no writing there; results that were asked different
            things.
    """
    try:
        about = json.loads((model / TRAINING).read_text(encoding="utf-8"))
        weights = (model / _WEIGHTS).read_bytes()
        described = [*_what(weights), "", *_training(about)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{model} is no model folder that train or export wrote: {error!r}", param="MODEL") from error
    files.write(model / NAME, _card(described, results, others, _turns(about)), "MODEL")


def parameters(weights: bytes) -> int:
    """Number of parameters, from the header of a safetensors file."""
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _card(described: Sequence[str], results: Sequence[Result], others: Sequence[Result], turns: int) -> str:
    parts = [described, _accuracy(results), _foreign(others), _limits(results[0], turns)]
    return "\n".join(["# The demo model", *(line for part in parts for line in ("", *part)), ""])


def _what(weights: bytes) -> list[str]:
    return [
        f"Qwen3-VL with {parameters(weights) / 1e6:.1f} million parameters: {DEMO.vision_layers} vision and "
        f"{DEMO.text_layers} text layers of {DEMO.hidden}, heads of {DEMO.head_dim} in both; {len(weights) / 1e6:.1f} "
        "MB in bfloat16. It talks about pictures of up to three plain shapes, so that a request that got another "
        "picture's features gets a visibly wrong answer. It is no useful model.",
        "",
        f"`{_WEIGHTS}`: SHA-256 `{hashlib.sha256(weights).hexdigest()}`",
    ]


def _training(about: Mapping[str, Any]) -> list[str]:
    randomised = about["plan"].get("randomised", 0)
    return [
        "## What it was taught",
        "",
        f"Pictures: 0 to 3 shapes ({', '.join(KINDS)}; {', '.join(COLOURS)}) in cells of a 3x3 grid on "
        f"{len(BACKGROUNDS)} plain backgrounds, 64 pixels to 4K; the processor makes {MIN_PIXELS // FACTOR**2} to "
        f"about {MAX_PIXELS // FACTOR**2} tokens of any. Of {randomised:.0%} of them only the order and the "
        "rough places are those of the grid, and all else is by chance: sizes, shades, turns, edges, outlines, "
        "textures and gradients, shadows, light, blur, noise, JPEG. Shapes are listed left to right, then top to "
        "bottom. All are drawn by chance from a seed (`tests/demo_model/`); no other data.",
        "",
        *_runs(about),
        "",
        *(_COMMANDS if "before" not in about else _FURTHER_COMMANDS),
    ]


def _turns(about: Mapping[str, Any]) -> int:
    """Of the longest conversations of a training; those before plans named them had four."""
    return int(about["plan"].get("turns", 4))


def _runs(about: Mapping[str, Any]) -> list[str]:
    """What was trained, the first training first."""
    plan, before = about["plan"], about.get("before")
    pictures = plan["vision_steps"] * plan["vision_pictures"]
    alone = f"{plan['vision_steps']} steps of the vision tower alone ({pictures} pictures), then " if pictures else ""
    began = f"Went on from those weights (SHA-256 `{plan['begun_from']}`)" if before else "Training"
    line = (
        f"{began}: seed {plan['seed']}, {alone}{plan['dialogue_steps']} steps of questions and answers; "
        f"{about['cpu_s'] / 60:.0f} CPU minutes. "
    )
    shown = (
        f"{plan.get('randomised', 0):.0%} of the pictures as others might draw them, conversations of up to "
        f"{_turns(about)} turns."
    )
    return [*(_runs(before) if before else []), f"- {line}{shown}"]


def _accuracy(results: Sequence[Result]) -> list[str]:
    first = results[0]
    trained = sum(map(len, TRAIN_TEMPLATES.values())) + sum(len(seen) for _, seen, _ in SMALL_TALK)
    kept = sum(map(len, EVAL_TEMPLATES.values())) + sum(len(unseen) for _, _, unseen in SMALL_TALK)
    same, questions = alike(results)
    lines = [
        "## How well it does",
        "",
        f"Exact match of greedy answers, {first.per_task} questions per task (seed {first.seed}), through vLLM behind "
        f"EPD-Serve. No arrangement of shapes in them is in the training data (one in {HELD_OUT_OF} is kept back; "
        "the empty picture, which has none, is in both), and no sentence, whatever its case, marks or spelling of "
        f'"colour": {kept} wordings are evaluated, {trained} others were trained on. Unseen wordings are new '
        "sentences of words that were seen.",
        "",
        f"| task | for example | {' | '.join(it.served_as for it in results)} | 95 % interval | commonest answer |",
        "|---|---|" + "---|" * len(results) + "---|---|",
    ]
    for name in first.tasks:
        answers = first.of(name)
        low, high = interval(answers)
        cells = [_percent(share(result.of(name))) for result in results]
        cells += [f"{100 * low:.1f} to {_percent(high)}", _percent(commonest(answers))]
        lines.append(f"| {name} | {_ABOUT[name]} | {' | '.join(cells)} |")
    lines += ["", f"The last column is what always giving the commonest answer would get. {_fewer(first)}"]
    if len(results) > 1:
        lines += ["", f"{' and '.join(it.served_as for it in results)} gave the same answer to {same} of {questions}."]
    one = split([it for it in first.answers if it.task in ONE_PICTURE], _BY_SIZE)
    several = split([it for it in first.answers if it.task in SEVERAL], _BY_NUMBER)
    lines += ["", *_split("Questions about one picture", one), *_split("Questions about several", several)]
    return lines


def _foreign(results: Sequence[Result]) -> list[str]:
    first = results[0]
    same, questions = alike(results)
    lines = [
        "## Pictures that other code drew",
        "",
        'Exact match of "What is in the picture?", in unseen wordings, about one, two and three shapes that other '
        "programs drew (`tests/demo_model/foreign/`): shapes of any size and place, other shades, gradients, "
        "outlines, light and dark backgrounds, noise and JPEG. **All of these generators are held out**: training "
        f"draws with numpy alone. Seed {first.seed}; the pictures of the browser are kept in `browser.zip`. A person "
        "can tell the order: shapes of one column lie above one another.",
        "",
        f"| drawn by | {' | '.join(NUMBERS[:MOST_SHAPES])} | pictures each |",
        "|---|" + "---|" * (MOST_SHAPES + 1),
    ]
    shares: dict[int, list[float]] = {shapes: [] for shapes in range(1, MOST_SHAPES + 1)}
    for name, generator in GENERATORS.items():
        answers = {shapes: first.of(task(name, shapes)) for shapes in shares}
        if all(answers.values()):
            for shapes, asked in answers.items():
                shares[shapes].append(share(asked))
            cells = [_percent(share(asked)) for asked in answers.values()]
            lines.append(f"| {name}: {generator.about} | {' | '.join(cells)} | {len(answers[1])} |")
    if shares[1]:
        lines.append(f"| mean | {' | '.join(_percent(sum(it) / len(it)) for it in shares.values())} | |")
    lines += ["", f"Served as {first.served_as}."]
    if len(results) > 1:
        lines[-1] += f" {' and '.join(it.served_as for it in results)} gave the same answer to {same} of {questions}."
    return lines


_BY_SIZE = {
    f"{_SMALL} pixels on the shorter side": lambda it: min(it.sizes[0]) <= _SMALL,
    f"{_LARGE} pixels or more on the longer": lambda it: max(it.sizes[0]) >= _LARGE,
    "all others": lambda it: min(it.sizes[0]) > _SMALL and max(it.sizes[0]) < _LARGE,
}
_BY_NUMBER = {
    "two": lambda it: len(it.sizes) == 2,
    "three": lambda it: len(it.sizes) == 3,
    "four": lambda it: len(it.sizes) == 4,
}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _fewer(result: Result) -> str:
    """Which tasks ask the same more than once."""
    counts = {task: (len(different(result.of(task))), len(result.of(task))) for task in result.tasks}
    repeated = [f"{task} has {number} different ones" for task, (number, of) in counts.items() if number < of]
    return f"Some questions repeat, and count once for the interval: {', '.join(repeated)}." if repeated else ""


def _split(title: str, groups: Mapping[str, tuple[float, int]]) -> list[str]:
    parts = [f"{kind} {_percent(right)} (of {number})" for kind, (right, number) in groups.items()]
    return [f"{title}: {', '.join(parts)}."] if parts else []


def _limits(result: Result, turns: int) -> list[str]:
    missed = [task for task in result.tasks if share(result.of(task)) < _GOALS[task]]
    below = [f"{task} {_percent(share(result.of(task)))} of {_GOALS[task]:.0%}" for task in missed]
    return [
        "## Limits",
        "",
        *([f"- Below what was asked of it: {', '.join(below)}."] if below else []),
        "- It sees nothing but these shapes: text, other colours and shapes get an answer all the same. Photographs of "
        "drawings were simulated; no real photograph was evaluated.",
        "- Shapes that overlap, or whose order from left to right a person would have to guess, it was not taught.",
        "- Its pictures were at most twice as long as wide, or as wide as long; it was not evaluated with longer ones.",
        "- Questions outside its tasks get one of its own sentences. It knows English only.",
        f"- It was taught conversations of up to {turns} turns. In longer ones it may go on with what was said before.",
        "- A question about something that is not there (the colour of a circle where none is, the third of two "
        "pictures) gets a made-up answer.",
        "- It describes pictures one by one or in order; which of them shows something it was not taught to say.",
        '- Four pictures at most; it was never taught videos. Without a number, "the picture" is the newest one.',
    ]
