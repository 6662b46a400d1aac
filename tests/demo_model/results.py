"""Results of `evaluate`, read: checked, compared, counted.

Owns what a result has to be and every figure that is counted from its answers. Leaves to others: writing one
(`evaluation`), the text made of it (`card`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_serve.errors import ConfigError
from tests.demo_model.evaluation import AnsweredQuestion, share
from tests.demo_model.examination import TASKS, WITHOUT_PICTURE


@dataclass(frozen=True)
class Result:
    """What one way of serving answered.

    Attributes:
        served_as: that way, e.g. `(E-P)-D`.
        per_task, seed: which questions these were.
        answers: all of them, in the order of the questions.
    """

    served_as: str
    per_task: int
    seed: int
    answers: tuple[AnsweredQuestion, ...]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(it.task for it in self.answers))

    def of(self, task: str) -> list[AnsweredQuestion]:
        return [it for it in self.answers if it.task == task]


def read(path: Path, tasks: Sequence[str] = TASKS) -> Result:
    """A result of `evaluate`, about `tasks`.

    Raises:
        ConfigError: it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = content["about"]
        answers = tuple(_answered_question(it, tasks) for it in content["answers"])
        return Result(str(about["served_as"]), int(about["per_task"]), int(about["seed"]), answers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of evaluate: {error!r}", param="RESULT") from error


def _answered_question(written: Mapping[str, Any], tasks: Sequence[str]) -> AnsweredQuestion:
    sizes = tuple((int(width), int(height)) for width, height in written["sizes"])
    texts = [written[name] for name in ("task", "question", "expected", "answer")]
    if not all(isinstance(text, str) for text in texts) or texts[0] not in tasks:
        raise ValueError(f"no answer to a task: {written}")
    if bool(sizes) == (texts[0] in WITHOUT_PICTURE):
        raise ValueError(f"{len(sizes)} pictures in {texts[0]}")
    task, question, expected, answer = texts
    return AnsweredQuestion(task, question, expected, answer, sizes)


def alike(results: Sequence[Result]) -> tuple[int, int]:
    """(questions to which all gave the same answer, questions).

    Raises:
        ConfigError: they were asked different things.
    """
    first, *others = results
    items = [(it.task, it.question, it.expected, it.sizes) for it in first.answers]
    for other in others:
        if items != [(it.task, it.question, it.expected, it.sizes) for it in other.answers]:
            raise ConfigError(
                f"{other.served_as} was asked other questions than {first.served_as}: evaluate both with the same "
                "--number, --task and version of this program",
                param="RESULT",
            )
    answers = zip(*([it.answer for it in result.answers] for result in results), strict=True)
    return sum(len(set(it)) == 1 for it in answers), len(items)


def commonest(answers: Sequence[AnsweredQuestion]) -> float:
    """Share that the commonest answer alone would get."""
    return Counter(it.expected for it in answers).most_common(1)[0][1] / len(answers)


def different(answers: Sequence[AnsweredQuestion]) -> list[AnsweredQuestion]:
    """One answer per question of a task, where questions repeat: without pictures. With them each is another."""
    return list(answers) if answers[0].sizes else list({it.question: it for it in answers}.values())


def interval(answers: Sequence[AnsweredQuestion]) -> tuple[float, float]:
    """95 % interval of `share` (Wilson's score interval), over different questions of a task."""
    answers = different(answers)
    number, z = len(answers), 1.96
    middle = (share(answers) + z * z / (2 * number)) / (1 + z * z / number)
    half = (
        z / (1 + z * z / number) * math.sqrt(share(answers) * (1 - share(answers)) / number + (z / (2 * number)) ** 2)
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def split(
    answers: Sequence[AnsweredQuestion], kinds: dict[str, Callable[[AnsweredQuestion], bool]]
) -> dict[str, tuple[float, int]]:
    """Per kind of question (share of right answers, number), without kinds that nobody was asked."""
    groups = {kind: [it for it in answers if belongs(it)] for kind, belongs in kinds.items()}
    return {kind: (share(group), len(group)) for kind, group in groups.items() if group}
