"""The model card beside the weights: what the model can do and how well, from the evaluation's own files.

Owns its text. Every number in it is read: accuracy from results of `evaluate`, sizes from the weights' header,
amounts of training from the plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epd_serve.demo.pictures import BACKGROUNDS, COLOURS, KINDS
from epd_serve.demo.training.architecture import DEMO, FACTOR, MAX_PIXELS, MIN_PIXELS
from epd_serve.demo.training.scenes import HELD_OUT_OF
from epd_serve.demo.training.wordings import SEEN, UNSEEN
from epd_serve.errors import ConfigError

NAME = "MODEL_CARD.md"
OFFERED = 0.9  # a task answered less often than this is named as a limit
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
    "no picture": "a question about a picture that nobody sent",
}


def read_result(path: Path) -> dict[str, Any]:
    """A result of `evaluate`.

    Raises:
        ConfigError: not one.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = result["accuracy"], result["about"]["per_task"], result["about"]["served_as"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of evaluate: {error!r}", param="RESULT") from error
    return result


def parameters(model: Path) -> int:
    """Number of parameters, from the header of the weights."""
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def card(model: Path, results: Sequence[Mapping[str, Any]], training: Mapping[str, Any]) -> str:
    """The card's Markdown.

    Args:
        model: the folder.
        results: of `evaluate`, one per way of serving.
        training: what `train` wrote beside the weights: plan and CPU seconds.
    """
    plan = training["plan"]
    pictures = plan["vision_steps"] * plan["vision_pictures"]
    served = [result["about"]["served_as"] for result in results]
    lines = [
        "# The demo model",
        "",
        f"Qwen3-VL with {parameters(model) / 1e6:.1f} million parameters: {DEMO.vision_layers} vision and "
        f"{DEMO.text_layers} text layers of {DEMO.hidden}, heads of {DEMO.head_dim} in both. It talks about pictures "
        "of up to three plain shapes, so that a request that got another picture's features gets a visibly wrong "
        "answer. It is no useful model.",
        "",
        "## What it was taught",
        "",
        f"Pictures: 0 to 3 shapes ({', '.join(KINDS)}; {', '.join(COLOURS)}) in cells of a 3x3 grid on "
        f"{len(BACKGROUNDS)} plain backgrounds, 64 pixels to 4K; the processor makes {MIN_PIXELS // FACTOR**2} to "
        f"about {MAX_PIXELS // FACTOR**2} tokens of any. Shapes are listed left to right, then top to bottom. All are "
        "drawn by chance from a seed (`epd_serve/demo/training/`); no other data.",
        "",
        f"Training: `python -m epd_serve.demo.training train`, seed {plan['seed']}: {plan['vision_steps']} steps of "
        f"the vision tower alone ({pictures} pictures), {plan['dialogue_steps']} steps of questions and answers; "
        f"{training['cpu_s'] / 60:.0f} CPU minutes.",
        "",
        "## How well it does",
        "",
        f"Exact match of greedy answers, {results[0]['about']['per_task']} questions per task, through vLLM behind "
        f"EPD-Serve (`python -m epd_serve.demo.training evaluate --url …`, seed {results[0]['about']['seed']}). No "
        f"arrangement of shapes is in the training data (one in {HELD_OUT_OF} is kept back), no sentence either: "
        f"{sum(map(len, UNSEEN.values()))} wordings are evaluated, {sum(map(len, SEEN.values()))} others were trained "
        "on. Most unseen wordings are new sentences of words that were seen.",
        "",
        "| task | for example | " + " | ".join(served) + " |",
        "|---|---|" + "---|" * len(served),
    ]
    for task in results[0]["accuracy"]:
        shares = [f"{result['accuracy'].get(task, 0.0):.1%}".replace("%", " %") for result in results]
        lines.append(f"| {task} | {_ABOUT.get(task, '')} | " + " | ".join(shares) + " |")
    weak = [task for task, share in results[0]["accuracy"].items() if share < OFFERED]
    lines += [
        "",
        "## Limits",
        "",
        *([f"- Often wrong: {', '.join(weak)}."] if weak else []),
        "- It sees nothing but these shapes: photographs, text, other colours and shapes get an answer all the same.",
        "- Questions outside its tasks get one of its own sentences. It knows English only.",
        "- A question about something that is not there (the colour of a circle where none is) gets a made-up answer.",
        "- It describes pictures one by one or in order; which of them shows something it was not taught to say.",
        '- Four pictures at most; it was never taught videos. Without a number, "the picture" is the newest one.',
        "",
    ]
    return "\n".join(lines)
