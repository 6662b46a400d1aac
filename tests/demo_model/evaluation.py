"""The evaluation: exact match of an endpoint's greedy answers, 500 questions per task, over HTTP.

Owns asking and the result's shape, which the model card is made of (`card`). Leaves to others: the questions
(`examination`), serving: any OpenAI endpoint over the model will do, a monolith and (E-P)-D have to agree.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from epd_serve.demo import pictures
from epd_serve.errors import ConfigError, StageError
from tests.demo_model import files
from tests.demo_model.examination import Question
from tests.demo_model.scenes import Scene

MAX_TOKENS = 96  # four pictures of three shapes, described in order, are 60
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class AnsweredQuestion:
    """One answered item; `right` is exact match but for white space around the answer.

    Attributes:
        task: of `examination.TASKS`.
        question, expected, answer: of the last turn.
        sizes: (width, height) of every picture, in order.
    """

    task: str
    question: str
    expected: str
    answer: str
    sizes: tuple[tuple[int, int], ...]

    @property
    def right(self) -> bool:
        return self.answer.strip() == self.expected


def picture_url(scene: Scene) -> str:
    """The scene's file, or a PNG drawn of it, in a data URL."""
    content, kind = scene.file, "image/png"
    if content is None:
        data = io.BytesIO()
        pictures.draw(scene.shapes, scene.size, scene.background).save(data, "PNG", compress_level=1)
        content = data.getvalue()
    else:
        kind = Image.open(io.BytesIO(content)).get_format_mimetype() or kind
    return f"data:{kind};base64," + base64.b64encode(content).decode()


def ask(client: httpx.Client, url: str, model: str, question: Question) -> AnsweredQuestion:
    """Ask turn by turn; later turns see the endpoint's own earlier answers, right or wrong.

    Raises:
        StageError: no answer.
    """
    messages: list[dict[str, Any]] = []
    reply = ""
    for turn in question.turns:
        images = [{"type": "image_url", "image_url": {"url": picture_url(scene)}} for scene in turn.scenes]
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": turn.question}]})
        body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        try:
            response = client.post(f"{url}/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise StageError(f"{url} does not answer: {error!r}", stage=url) from error
        if response.status_code != 200:
            raise StageError(f"{url} answers {response.status_code}: {response.text[:300]}", stage=url)
        try:
            reply = response.json()["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StageError(f"{url} answers no chat completion: {response.text[:300]}", stage=url) from error
        messages.append({"role": "assistant", "content": reply})
    sizes = tuple(scene.size for turn in question.turns for scene in turn.scenes)
    return AnsweredQuestion(question.task, question.turns[-1].question, question.answer, reply, sizes)


def ask_all(
    url: str, questions: Sequence[Question], *, at_once: int, tell: Callable[[int], None]
) -> list[AnsweredQuestion]:
    """Ask everything, `at_once` at a time, in the order of `questions`; `tell` gets the number answered so far.

    Raises:
        StageError: the endpoint fails; nothing more is asked then.
    """
    url = url.rstrip("/")
    limits = httpx.Limits(max_connections=at_once)
    with httpx.Client(timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
        model = _model(client, url)
        with ThreadPoolExecutor(at_once) as pool:
            try:
                answers: list[AnsweredQuestion] = []
                for answer in _in_order(pool, client, url, model, questions, at_once):
                    answers.append(answer)
                    tell(len(answers))
                return answers
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _in_order(
    pool: ThreadPoolExecutor, client: httpx.Client, url: str, model: str, questions: Sequence[Question], at_once: int
) -> Iterator[AnsweredQuestion]:
    waiting = [pool.submit(ask, client, url, model, it) for it in questions[: 2 * at_once]]
    for number in range(len(questions)):
        yield waiting.pop(0).result()
        if number + 2 * at_once < len(questions):
            waiting.append(pool.submit(ask, client, url, model, questions[number + 2 * at_once]))


def _model(client: httpx.Client, url: str) -> str:
    try:
        return str(client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, TypeError, ValueError) as error:
        raise StageError(f"{url}/v1/models names no model: {error!r}", stage=url) from error


def share(answers: Sequence[AnsweredQuestion]) -> float:
    """Share of right answers, 0 … 1; of at least one."""
    return sum(it.right for it in answers) / len(answers)


def accuracy(answers: Sequence[AnsweredQuestion]) -> dict[str, float]:
    """Share of right answers per task, in the order in which tasks appear."""
    tasks = dict.fromkeys(it.task for it in answers)
    return {task: share([it for it in answers if it.task == task]) for task in tasks}


def check_writable(path: Path) -> None:
    """Whether a result can be written there: known before thousands of questions are asked.

    Raises:
        ConfigError: it cannot.
    """
    files.prepare(path.parent, "--json")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file", param="--json")


def write(path: Path, answers: Sequence[AnsweredQuestion], about: dict[str, Any]) -> None:
    """Write accuracy, what was asked of whom, and every answer; whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    content = {"accuracy": accuracy(answers), "about": about, "answers": [asdict(it) for it in answers]}
    files.write(path, json.dumps(content, indent=1) + "\n", "--json")
